"""Caches that compress while a text grows, beside one that reads it first and is compressed then, and the last tokens.

    python examples/growing_cache.py --documents 4 --tokens 2048            # half an hour of one core
    python examples/growing_cache.py --table                               # the table from the runs beside this file

A document is read in chunks by a model with its full cache, with ``MeasureCache(model, compress=…, keep=…)`` and with
the same cache of other methods; the tokens after it are read by all of them and by ``compress`` of the whole text. KL
is per token, from the full cache. A run is a line of JSON beside this file; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from cumulant.cache import MeasureCache, compress
from cumulant.cache.audit.texts import CHARACTERS, default_documents, windows
from cumulant.observatory import load

RUNS = Path(__file__).with_suffix(".jsonl")
METHOD, LAST, ONCE = "backtest+norepeat", "stream", "compress, once"
TUNED = 8  # first documents of the audit's texts, on which settings were chosen
CHUNK, AFTER = 256, 256  # tokens of a pass, and tokens that are read after the text


def kl(full: Tensor, other: Tensor) -> Tensor:
    """(n,) KL(p ‖ q) of every prediction, logits (1, n, vocabulary)."""
    p, q = full[0].log_softmax(-1), other[0].log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


class Reader:
    """A cache that is read into, and what that cost."""

    def __init__(self, model: Any, cache: Any):
        self.model, self.cache, self.seconds, self.kl, self.most = model, cache, 0.0, [], 0

    @torch.no_grad()
    def read(self, ids: Tensor, full: Tensor | None = None) -> Tensor:
        start = time.process_time()
        logits = self.model(ids[None], past_key_values=self.cache).logits
        self.seconds += time.process_time() - start
        if full is not None:
            self.kl.append(kl(full, logits))
        if isinstance(self.cache, MeasureCache):
            self.most = max(self.most, self.cache.bytes())
        return logits


def run(model: Any, ids: Tensor, keep: float) -> dict[str, Any]:
    """All readers of one document, chunk by chunk in turn."""
    length = len(ids) - AFTER
    full = Reader(model, DynamicCache(config=model.config))
    readers = {name: Reader(model, MeasureCache(model, compress=name, keep=keep)) for name in (METHOD, LAST)}
    for start in range(0, length, CHUNK):
        part = ids[start : start + CHUNK]
        wanted = full.read(part)
        for reader in readers.values():
            reader.read(part, wanted)
    reading = {name: float(torch.cat(reader.kl)[CHUNK:].mean()) for name, reader in readers.items()}
    sample = readers[METHOD].cache.bytes() - readers[LAST].cache.bytes()
    more = min(keep + sample / (length * full_bytes(model)), 1.0)
    larger = readers[f"{LAST}, as many bytes"] = Reader(model, MeasureCache(model, compress=LAST, keep=more))
    for part in ids[:length].split(CHUNK):
        larger.read(part)
    share = readers[METHOD].cache.bytes() / (length * full_bytes(model))
    for name, kept in ((ONCE, keep), (f"{ONCE}, as many bytes", share)):
        start = time.process_time()
        readers[name] = Reader(model, compress(model, ids[:length], keep=kept, method=METHOD))
        readers[name].seconds = time.process_time() - start
    wanted = full.read(ids[length:])
    rows = {}
    for name, reader in readers.items():
        seconds = reader.seconds
        held = reader.cache.bytes()
        reader.kl.clear()
        reader.read(ids[length:], wanted)
        after = reader.kl[0]
        rows[name] = {
            "while": reading.get(name),
            "after": float(after.mean()),
            "after32": float(after[:32].mean()),
            "times": seconds / (full.seconds * length / (length + AFTER)),
            "held": held / (length * full_bytes(model)),
            "most": reader.most / (length * full_bytes(model)),
        }
    return rows


def full_bytes(model: Any) -> int:
    """Bytes of the keys and values of a token."""
    c = model.config
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4


def table(path: Path = RUNS) -> str:
    """Geometric means over documents, for every length and share."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    out = ["| tokens | keep | cache | KL while it is read | KL, next 256 | next 32 | held | at most | time |"]
    out.append("|---" * 9 + "|")
    for tokens, keep in sorted({(x["tokens"], x["keep"]) for x in lines}):
        runs = [x["rows"] for x in lines if (x["tokens"], x["keep"]) == (tokens, keep)]
        for name in runs[0]:
            found = [r[name] for r in runs]

            def mean(key: str, found: list = found) -> str:
                values = [f[key] for f in found]
                return "–" if values[0] is None else f"{math.exp(sum(map(math.log, values)) / len(values)):.4f}"

            def share(key: str, found: list = found) -> str:
                return f"{sum(f[key] for f in found) / len(found):.2f}"

            most = "1.00" if name.startswith(ONCE) else share("most")
            cells = tokens, keep, f"`{name}`", mean("while"), mean("after"), mean("after32"), share("held"), most
            out.append(f"| {' | '.join(map(str, cells))} | {share('times')} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--keep", default="0.25,0.125")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    loaded = load(options.model)
    loaded.model.set_attn_implementation("cumulant")  # pyright: ignore[reportCallIssue]
    done = set()
    if RUNS.exists():
        done = {
            tuple(json.loads(line)[k] for k in ("name", "tokens", "keep")) for line in RUNS.read_text().splitlines()
        }
    length, number = options.tokens + AFTER, TUNED + options.documents
    texts = default_documents(CHARACTERS * length, number)
    for window in windows(texts, loaded.tokenizer, length - 1, 0, number)[TUNED:]:
        for keep in map(float, options.keep.split(",")):
            if (window.name, options.tokens, keep) in done:
                continue
            rows = run(loaded.model, window.input_ids[:length], keep)
            line = {"name": window.name, "tokens": options.tokens, "keep": keep, "rows": rows}
            with RUNS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(window.name, keep, {k: round(v["after"], 5) for k, v in rows.items()}, flush=True)


if __name__ == "__main__":
    main()
