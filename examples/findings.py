"""Which pictures of the paper hold in which model: several kinds of text, several draws, intervals by document.

Every document is read alone and has a record of its own; the numbers of the page's verdicts are computed from the sum
of these, and intervals from sums of documents drawn again with replacement. Documents are what every machine with this
environment has: pages of Python's help, modules of its library, licences and descriptions of installed packages.
Whisper hears descriptions and help, spoken by espeak-ng.

python examples/findings.py minilm --seeds 3                     # a few minutes; smollm2, whisper, gemma3 alike
python examples/findings.py minilm smollm2 --table findings.md   # the table, from results that are there
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import re
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cumulant.observatory import load, observe
from cumulant.observatory.hooks.hidden_states import merge_layers
from cumulant.observatory.models.load import Loaded, random_twin
from cumulant.observatory.record.bootstrap import cluster_intervals
from cumulant.observatory.record.record import Record
from cumulant.observatory.record.tables import Tables, head_rows, layer_table
from cumulant.observatory.record.weights import with_weights
from cumulant.observatory.report.verdicts import verdicts
from cumulant.observatory.text.corpus import Text, plan

QUANTITIES = ("condensed", "first_mass", "fisher_top")  # what verdicts rest on; the last brings the fits of heads
TAGGED = re.compile(r"<[^>]*>|https?://\S+|[^A-Za-z0-9,.'?! -]")
LEAST = 1200  # characters of a document


def help_pages() -> dict[str, str]:
    """Topics of Python's own help."""
    from pydoc_data.topics import topics

    return {f"help/{name}": body for name, body in topics.items()}


def code() -> dict[str, str]:
    """Modules of Python's library."""
    paths = Path(sysconfig.get_path("stdlib")).glob("*.py")
    return {f"code/{path.name}": path.read_text(encoding="utf-8", errors="replace") for path in paths}


def licences() -> dict[str, str]:
    """Licences of installed packages, each text once whoever holds the rights."""
    found = {}
    for package in importlib.metadata.distributions():
        for file in package.files or ():
            if re.match(r"(LICEN[CS]E|COPYING)", file.name) and ".dist-info" in str(file):
                found[f"licence/{package.name}/{file.name}"] = Path(str(file.locate())).read_text(errors="replace")
    ends = {body.strip()[-300:]: name for name, body in sorted(found.items(), reverse=True)}
    return {name: found[name] for name in ends.values()}


def prose() -> dict[str, str]:
    """Descriptions of installed packages."""
    packages = {package.name: package.metadata.json for package in importlib.metadata.distributions()}
    return {f"prose/{name}": str(about.get("description", "")) for name, about in packages.items()}


KINDS = {"prose": prose, "code": code, "help": help_pages, "licences": licences}


def draw(kind: str, count: int, seed: int) -> list[Text]:
    """Documents of a kind, drawn by a seed."""
    bodies = {name: body for name, body in sorted(KINDS[kind]().items()) if len(body) >= LEAST}
    names = random.Random(f"{kind} {seed}").sample(list(bodies), count)
    return [Text(100 * list(KINDS).index(kind) + i, name, bodies[name]) for i, name in enumerate(names)]


def spoken(texts: list[Text], directory: Path, characters: int = 360) -> Iterator[Text]:
    """Recordings of the beginnings of texts."""
    for number, text in enumerate(texts):
        words = " ".join(TAGGED.sub(" ", text.body).split())[:characters].rpartition(" ")[0]
        path = directory / f"{number:02d}-{text.name.replace('/', '-')}.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(path), words], check=True)
        (one,) = plan(audio=path).texts()
        yield one._replace(index=text.index, name=text.name)


def read(model: Loaded, texts: list[Text], tokens: int, seed: int) -> tuple[list[Record], Record]:
    """A record for each document, without what is no sum over tokens, and the record of all."""
    parts, hidden = [], {}
    for text in texts:
        options = {"quantities": QUANTITIES, "max_tokens": tokens, "seed": seed, "batch_size": 2, "weights": False}
        record = observe(model, [text], **options, perturbed_share=0.5)
        hidden = merge_layers(hidden, record.hidden) if hidden else record.hidden
        slim = {key: value for key, value in record.hidden.items() if ":tally." in key}
        parts.append(replace(record, hidden=slim, excerpts=()))
        print(f"{model.name} {text.name}: {record.meta.tokens} tokens", flush=True)
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.merge(part)
    return parts, with_weights(replace(whole, hidden=hidden), model.model)


def numbers(record: Record, side: str = "") -> dict[str, float]:
    """The numbers of the verdicts, of all heads or of those on one side of a model."""
    layers = {index for index, layer in enumerate(record.modules) if side in ("", layer.side)}
    heads = [row for row in head_rows(record) if row.layer in layers]
    answers = verdicts(heads, [] if side else layer_table(record), [], record.meta.dimension or 1)
    return {n.label: n.value for answer in answers for n in answer.numbers if n.value is not None}


def run(model: Loaded, seed: int, count: int, tokens: int, null: bool, replicates: int) -> dict:
    """All numbers of a model on one draw of documents."""
    start = time.perf_counter()
    hears = model.features is not None
    kinds = ("prose", "help") if hears else tuple(KINDS)
    texts = [text for kind in kinds for text in draw(kind, count, seed)]
    with tempfile.TemporaryDirectory() as room:
        texts = list(spoken(texts, Path(room))) if hears else texts
        parts, whole = read(model, texts, tokens, seed)
        nulls = {}
        if null:
            twin = replace(model, model=random_twin(model, seed), transcriber=model.model if hears else None)
            nulls = numbers(read(twin, texts, tokens, seed)[1])
    tables = Tables.of(whole)
    answers = verdicts(tables.heads, tables.layers, [], whole.meta.dimension or 1)
    with_constants = [replace(part, weights=whole.weights) for part in parts]
    intervals = cluster_intervals(with_constants, numbers, replicates=replicates, seed=seed)
    sides = [side for side in dict.fromkeys(layer.side for layer in whole.modules) if side]
    by_kind = {
        k: [p for p, t in zip(parts, texts, strict=True) if t.index // 100 == list(KINDS).index(k)] for k in kinds
    }
    return {
        "model": model.name,
        "seed": seed,
        "documents": [text.name for text in texts],
        "tokens": whole.meta.tokens,
        "answers": {a.question: a.answer for a in answers},
        "values": {n.label: n.value for a in answers for n in a.numbers},
        "nulls": nulls | {n.label: n.null for a in answers for n in a.numbers if n.label.startswith("sliced")},
        "intervals": {name: list(interval) for name, interval in intervals.items()},
        "kinds": {kind: numbers(merged(some)) for kind, some in by_kind.items()},
        "sides": {side: numbers(whole, side) for side in sides},
        "seconds": round(time.perf_counter() - start),
    }


def merged(records: list[Record]) -> Record:
    whole = records[0]
    for record in records[1:]:
        whole = whole.merge(record)
    return whole


def table(results: list[dict]) -> str:
    """Numbers with intervals of every run, a column each; the null in brackets."""
    labels = dict.fromkeys(label for one in results for label in one["values"] if not label.startswith("sliced"))
    heads = [f"{one['model']}, draw {one['seed']}" for one in results]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    lines.append(
        "| documents, tokens | " + " | ".join(f"{len(o['documents'])}, {o['tokens']:,}" for o in results) + " |"
    )
    for question in dict.fromkeys(question for one in results for question in one["answers"]):
        lines.append(f"| **{question}** | " + " | ".join(one["answers"].get(question, "–") for one in results) + " |")
    for label in labels:
        lines.append(f"| {label} | " + " | ".join(_cell(one, label) for one in results) + " |")
    return "\n".join(lines) + "\n"


def _cell(one: dict, label: str) -> str:
    value, ends, null = one["values"].get(label), one["intervals"].get(label), one["nulls"].get(label)
    if value is None:
        return "–"
    # a fit with many slopes gains from documents that are drawn twice: its draws lie beside it and say nothing of it
    known = ends is not None and ends[1] <= value <= ends[2] and ends[2] - ends[1] > 1e-12
    middle = f" [{ends[1]:.2g}, {ends[2]:.2g}]" if ends is not None and known else ""
    return f"{value:.3g}{middle}" + (f" ({null:.2g})" if null is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="minilm, smollm2, whisper, gemma3")
    parser.add_argument("--seeds", type=int, default=1, help="draws of documents")
    parser.add_argument("--documents", type=int, default=4, help="of each kind")
    parser.add_argument("--tokens", type=int, default=512, help="of each document, at most")
    parser.add_argument(
        "--replicates", type=int, default=200, help="draws of documents with replacement, for intervals"
    )
    parser.add_argument("--no-null", action="store_true", help="without random weights")
    parser.add_argument("--out", type=Path, default=Path("findings"), help="directory of the results")
    parser.add_argument("--table", type=Path, help="write a table of the results that are there, and read nothing")
    given = parser.parse_args()
    if given.table is not None:
        found = [
            json.loads(path.read_text()) for name in given.models for path in sorted(given.out.glob(f"{name}-*.json"))
        ]
        given.table.write_text(table(found))
        return
    given.out.mkdir(exist_ok=True)
    for name in given.models:
        model = load(name)
        for seed in range(given.seeds):
            result = run(model, seed, given.documents, given.tokens, not given.no_null and seed == 0, given.replicates)
            (given.out / f"{name}-{seed}.json").write_text(json.dumps(result, indent=1))
            print(table([result]))


if __name__ == "__main__":
    main()
