"""Methods that compress a cache, compared on windows that none of them was tuned on.

    python examples/compressed_caches.py --documents 20 --windows 2        # about an hour of two cores
    python examples/compressed_caches.py --table                           # the table from the runs beside this file

Of every document two windows are taken, one after the other: a prefix is read and compressed, and the tokens after it
are read with the full cache and with each compressed one. The first documents of the audit's texts were used to choose
the settings of `backtest` and `matching` (--skip leaves them out). A run is a line of JSON beside this file; what is
there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.cache import compress_prefix, on_cumulant, prefill
from cumulant.cache.audit.continuation import logits_after
from cumulant.cache.audit.retrieval import retrieval_prefix, right_answers
from cumulant.cache.audit.texts import CHARACTERS, TextWindow, default_documents, windows
from cumulant.cache.audit.token_errors import full_predictions, token_errors
from cumulant.cache.compressor import Compressor
from cumulant.cache.fitted.named import method
from cumulant.observatory import load
from cumulant.observatory.models.load import Loaded
from cumulant.observatory.record.bootstrap import draw_counts

RUNS = Path(__file__).with_suffix(".jsonl")
METHODS = ("backtest", "backtest+norepeat", "matching+norepeat", "matching", "kvzip", "h2o")
# settings tried on the first eight documents
TRIALS = dict.fromkeys(("backtest", "backtest+norepeat", "matching", "matching+norepeat"), 17)
COLUMNS = (
    *("keep", "method", "KL, 512 tokens", "KL, 128 tokens", "times `backtest`'s", "windows where `backtest` has less"),
    *("NLL", "found", "prefills", "settings tried"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"
KEEPS = (0.25, 0.125, 0.0625)
SHORT = 128  # the nearer of two horizons


class Piece(NamedTuple):
    """A window of a document: which one, and its tokens."""

    document: TextWindow
    number: int
    input_ids: Tensor


def pieces(tokenizer, prefix: int, horizon: int, skip: int, documents: int, each: int) -> Iterator[Piece]:
    """``each`` windows, one after the other, of documents after the first ``skip``."""
    length = prefix + horizon + 1
    texts = default_documents(CHARACTERS * length * each, skip + documents)
    for document in windows(texts, tokenizer, each * length - 1, 0, skip + documents)[skip:]:
        for number in range(each):
            yield Piece(document, number, document.input_ids[number * length : (number + 1) * length])


def runs_of(
    piece: Piece, loaded: Loaded, compressors: Mapping[str, Compressor], prefix: int, keeps: Sequence[float] = KEEPS
) -> Iterator[dict]:
    """A line for every method and budget; questions are asked in the first window of a document."""
    ids, model = piece.input_ids, loaded.model
    read = prefill(model, ids[:prefix], loaded.tokenizer)
    full = model(input_ids=ids[None, prefix:-1], past_key_values=read.copy_cache()).logits[0]
    predicted = full_predictions(full, ids[prefix + 1 :])
    asked = hidden = None
    if piece.number == 0:
        asked = retrieval_prefix(loaded.tokenizer, piece.document.filler, prefix, piece.document.document)
        hidden = prefill(model, asked.input_ids, loaded.tokenizer)
    for name, compressor in compressors.items():
        for keep in keeps:
            made = compress_prefix(read, compressor, keep)
            logits, _ = logits_after(read, made.cache(read), ids[prefix:-1])
            errors = token_errors(predicted, logits)
            right = of = 0
            if asked is not None and hidden is not None:
                cache = compress_prefix(hidden, compressor, keep).cache(hidden)
                for question, answer in asked.questions.values():
                    found = right_answers(logits_after(hidden, cache, question)[0], question, answer)
                    right, of = right + found[0], of + found[1]
            yield {
                "method": name,
                "keep": keep,
                "prefix": prefix,
                "document": piece.document.document,
                "kind": piece.document.kind,
                "window": piece.number,
                "held": round(made.keep, 4),
                "kl_128": float(errors.kl[:SHORT].mean()),
                "kl": float(errors.kl.mean()),
                "nll": float((errors.nll - errors.full).mean()),
                "same": float(errors.agrees.double().mean()),
                "right": right,
                "of": of,
                "prefills": round(made.seconds / read.seconds, 2),
            }


def measure(options: argparse.Namespace) -> None:
    """Run what is missing, window by window."""
    torch.set_num_threads(options.threads)
    loaded = load("smollm2")
    done = {(r["method"], r["prefix"], r["document"], r["window"]) for r in saved()}
    with on_cumulant(loaded.model), torch.no_grad():
        all_pieces = list(
            pieces(loaded.tokenizer, options.prefix, options.horizon, options.skip, options.documents, options.windows)
        )
        for piece in all_pieces[options.part :: options.parts]:
            key = options.prefix, piece.document.document, piece.number
            names = [name for name in options.methods.split(",") if (name, *key) not in done]
            chosen = {name: method(name) for name in names}
            lines = [json.dumps(run) for run in runs_of(piece, loaded, chosen, options.prefix)] if names else []
            with RUNS.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
            print(f"document {piece.document.document}, window {piece.number}: {', '.join(names) or 'was there'}")


def saved() -> list[dict]:
    """Runs that are beside this file."""
    return [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()] if RUNS.exists() else []


def geometric(runs: list[dict], name: str = "kl") -> tuple[float, float, float]:
    """Geometric mean over windows, with the middle 95 % of what other draws of documents give."""
    documents = sorted({r["document"] for r in runs})
    sums = torch.tensor([sum(math.log(r[name]) for r in runs if r["document"] == d) for d in documents])
    counts = torch.tensor([sum(r["document"] == d for r in runs) for d in documents])
    drawn = draw_counts(len(documents), 1000).to(sums)
    means = ((drawn @ sums) / (drawn @ counts.to(sums))).exp()
    low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
    return math.exp(float(sums.sum() / counts.sum())), low, high


def table(prefix: int) -> str:
    """Markdown: every method at every budget, and how `backtest` does on the same windows."""
    runs = [r for r in saved() if r["prefix"] == prefix]
    names = sorted({r["method"] for r in runs}, key=METHODS.index)
    return "\n".join([HEADER, *(row(runs, name, keep) for keep in KEEPS for name in names)])


def row(runs: list[dict], name: str, keep: float) -> str:
    """One row of the table."""
    own, ours = ([r for r in runs if (r["method"], r["keep"]) == (n, keep)] for n in (name, "backtest"))
    by_window = {(r["document"], r["window"]): r for r in ours}
    shared = [r for r in own if (r["document"], r["window"]) in by_window]
    less = sum(by_window[r["document"], r["window"]]["kl"] < r["kl"] for r in shared)
    same_windows = [by_window[r["document"], r["window"]] for r in shared]
    kl, low, high = geometric(own)
    asked = sum(r["of"] for r in own)
    cells = [f"{keep:g}", f"`{name}`", f"{kl:.4f} [{low:.4f}, {high:.4f}]", f"{geometric(own, 'kl_128')[0]:.4f}"]
    if name == "backtest":
        cells += ["1", "–"]
    else:
        cells += [f"{geometric(shared)[0] / geometric(same_windows)[0]:.2g}", f"{less} of {len(shared)}"]
    cells += [f"{mean(own, 'nll'):+.4f}", f"{sum(r['right'] for r in own) / asked:.2f}" if asked else "–"]
    return "| " + " | ".join([*cells, f"{mean(own, 'prefills'):.1f}", str(TRIALS.get(name, 1))]) + " |"


def mean(runs: list[dict], name: str) -> float:
    """Over windows."""
    return sum(r[name] for r in runs) / len(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Methods that compress a cache, compared.")
    parser.add_argument("--table", action="store_true", help="print the table of the runs that are there")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--windows", type=int, default=2, help="of each document")
    parser.add_argument("--skip", type=int, default=8, help="first documents, which settings were chosen on")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--horizon", type=int, default=512)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--part", type=int, default=0, help="of --parts: several processes share the windows")
    parser.add_argument("--parts", type=int, default=1)
    options = parser.parse_args()
    if not options.table:
        measure(options)
    for prefix in sorted({r["prefix"] for r in saved()}):
        print(f"\n{prefix} tokens compressed\n\n{table(prefix)}")


if __name__ == "__main__":
    main()
