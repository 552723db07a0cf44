"""Which pictures of the paper hold in which model: four kinds of text, several draws, intervals by document.

Every document is read alone and has a record of its own. The numbers behind the page's verdicts are those of the sum
of these records; intervals come from documents drawn again with replacement, those of fits from leaving documents out
one by one. Draws have no document in common, all models read the same ones, and each draw has random weights of its
own. Whisper hears the passages spoken by espeak-ng; its encoder, decoder and cross-attention are told apart.

python examples/findings.py minilm smollm2 whisper --draws 3        # findings/MODEL-DRAW.json; what is there is kept
python examples/findings.py minilm smollm2 whisper --table findings.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from math import isfinite, sqrt
from pathlib import Path
from statistics import mean

from documents import KINDS, all_passages, draw, spoken

from cumulant.files import write
from cumulant.observatory import load, observe
from cumulant.observatory.hooks.hidden_states import merge_layers
from cumulant.observatory.models.load import Loaded, random_twin
from cumulant.observatory.record.bootstrap import cluster_intervals, cluster_jackknife
from cumulant.observatory.record.record import Record
from cumulant.observatory.record.rows import HeadRow, LayerRow, known
from cumulant.observatory.record.tables import head_rows, layer_rows, needed_queries
from cumulant.observatory.record.weights import with_weights
from cumulant.observatory.report.verdicts import verdicts
from cumulant.observatory.statistics.gaussianity import needed_freedom
from cumulant.observatory.text.corpus import Text

QUANTITIES = ("condensed", "first_mass", "fisher_top")  # what verdicts rest on; the last brings the fits of heads
SAMPLED = 32  # one query in so many has a part in the fits
FITTED = ("link", "slope")  # in labels of numbers that a fit with many slopes gives
BOTH = ("answers", "null answers")
LINK = "Do W_Q and W_K approximate the canonical link?"


def read(model: Loaded, texts: list[Text], tokens: int, seed: int) -> tuple[list[Record], dict[int, dict]]:
    """A record for each document, without what is no sum over tokens; and the hidden states by kind."""
    parts, hidden, start = [], {}, time.perf_counter()
    for number, text in enumerate(texts, 1):
        options = {"quantities": QUANTITIES, "max_tokens": tokens, "seed": seed, "batch_size": 2, "weights": False}
        record = observe(model, [text], **options, perturbed_share=1.0)
        kind = text.index // 100
        hidden[kind] = merge_layers(hidden[kind], record.hidden) if kind in hidden else record.hidden
        slim = {key: value for key, value in record.hidden.items() if ":tally." in key}
        needed = SAMPLED * max(needed_queries(layer.dim) for layer in record.modules)
        links = needed <= len(texts) * tokens  # otherwise the fit is open, and its sums are large
        sums = {key: value for key, value in record.sums.items() if links or "/gauss/" in key}
        parts.append(replace(record, hidden=slim, sums=sums, excerpts=()))
        words = f"{record.meta.tokens} tokens, {time.perf_counter() - start:.0f} s"
        print(f"{model.name} {number}/{len(texts)} {text.name[:60]}: {words}", flush=True)
    return parts, hidden


def without_language_head(model: Loaded) -> Loaded:
    """The same model up to its last hidden states, which all numbers here are of; one that hears needs its head."""
    network = model.model
    inner = getattr(network, getattr(network, "base_model_prefix", ""), network)
    return model if model.features is not None else replace(model, model=inner)


def merged(records: list[Record], hidden: list[dict]) -> Record:
    """The record of several documents, with their hidden states."""
    whole, states = records[0], hidden[0]
    for record in records[1:]:
        whole = whole.merge(record)
    for state in hidden[1:]:
        states = merge_layers(states, state)
    return replace(whole, hidden=states)


Rows = tuple[list[HeadRow], list[LayerRow]]


def rows_by_side(record: Record) -> dict[str, Rows]:
    """Rows of encoder, decoder and cross-attention; of a model with one side under ""."""
    names = [layer.name for layer in record.modules]
    sides = [layer.side for layer in record.modules]
    heads, layers = head_rows(record), layer_rows(record.hidden, record.meta.stages, names)
    return {
        side: (
            [row for row in heads if sides[row.layer] == side],
            [row for row in layers if row.layer is not None and sides[row.layer] == side],
        )
        for side in dict.fromkeys(sides)
    }


def numbers(rows: Rows, dimension: int) -> dict[str, float]:
    """The numbers of the verdicts, and the shares by which some of them are given."""
    heads, layers = rows
    found = {n.label: n.value for answer in verdicts(heads, layers, [], dimension) for n in answer.numbers}
    values = {label: value for label, value in found.items() if value is not None and not label.startswith("sliced")}
    grow = known(row.step.value for row in layers if row.stage == "attention")
    norms = known(row.contraction.value for row in layers if row.role in ("norm", "front"))
    condensed = known(row.value("condensed") for row in heads)
    if grow:
        values["blocks in which attention and residual expand"] = sum(g > 0 for g in grow) / len(grow)
    if norms:
        values["norms that contract"] = sum(c < 0 for c in norms) / len(norms)
    if condensed:
        values["heads that condense for most tokens"] = sum(share > 0.5 for share in condensed) / len(condensed)
    return values


def answers(rows: Rows, base: Rows, dimension: int) -> dict[str, str]:
    """The verdicts; on random weights too, for a rule that these pass as well says little."""
    found = {a.question: a.answer for a in verdicts(*rows, base[0], dimension, base[1])}
    return found if LINK in found else found | {LINK: "open"}


def law(layers: list[LayerRow]) -> list[list[float]]:
    """Of every block: the distance of its states to a Gaussian over that of a Gaussian sample, and where 99.5 % end.

    Nothing where there are fewer tokens than a verdict takes.
    """
    ends = [row for row in layers if row.stage == "out"]
    laws = [row.sliced_w2 for row in ends if row.freedom >= needed_freedom(row.channels)]
    return [[w.value / w.null, w.null_high / w.null] for w in laws if isfinite(w.value)]


def by_label(record: Record) -> dict[str, float]:
    """All numbers of a record, "side: label" → value."""
    sides, dimension = rows_by_side(record), record.meta.dimension or 1
    return {f"{side}: {label}": x for side, rows in sides.items() for label, x in numbers(rows, dimension).items()}


def intervals(parts: list[Record], replicates: int, seed: int) -> dict[str, list[float]]:
    """By label: value, ends and standard error over documents; of numbers that depend on documents."""
    plain = [replace(p, sums={k: v for k, v in p.sums.items() if "/gauss/" in k}) for p in parts]
    links = [replace(p, tallies={}, hidden={}) for p in parts if "link" in " ".join(p.sums)]
    found = cluster_intervals(plain, by_label, replicates=replicates, seed=seed)
    found |= cluster_jackknife(links, lambda r: {k: v for k, v in by_label(r).items() if is_fit(k)}) if links else {}
    return {label: list(interval) for label, interval in found.items()}


def is_fit(label: str) -> bool:
    return any(word in label for word in FITTED)


def random_rows(model: Loaded, texts: list[Text], tokens: int, seed: int) -> dict[str, Rows]:
    """The same architecture at random initialisation, on the same documents."""
    transcriber = model.model if model.features is not None else None
    twin = replace(model, model=random_twin(model, seed), name=f"random {model.name}", transcriber=transcriber)
    parts, hidden = read(twin, texts, tokens, seed)
    return rows_by_side(with_weights(merged(parts, list(hidden.values())), twin.model))


def run(model: Loaded, texts: list[Text], seed: int, tokens: int, null: bool, replicates: int) -> dict:
    """All numbers of a model on one draw of documents, by side."""
    start = time.perf_counter()
    parts, hidden = read(model, texts, tokens, seed)
    kinds = {}
    for index, states in hidden.items():
        some = [part for part, text in zip(parts, texts, strict=True) if text.index // 100 == index]
        kinds[list(KINDS)[index]] = rows_by_side(merged(some, [states]))
    whole = with_weights(merged(parts, list(hidden.values())), model.model)
    trained, meta = rows_by_side(whole), whole.meta
    del hidden, whole  # covariances of every stage: gigabytes
    nulls = random_rows(model, texts, tokens, seed) if null else {}
    ends, dimension, sides = intervals(parts, replicates, seed), meta.dimension or 1, {}
    for side, rows in trained.items():
        base = nulls.get(side, ([], []))
        sides[side] = {
            "answers": answers(rows, base, dimension),
            "null answers": answers(base, ([], []), dimension) if null else {},
            "values": numbers(rows, dimension),
            "law": law(rows[1]),
            "nulls": numbers(base, dimension),
            "null law": law(base[1]),
            "intervals": {k.split(": ", 1)[1]: v for k, v in ends.items() if k.split(": ", 1)[0] == side},
            "kinds": {kind: numbers(rows[side], dimension) for kind, rows in kinds.items()},
            "kinds law": {kind: law(rows[side][1]) for kind, rows in kinds.items()},
        }
    counts = {"tokens": meta.tokens, "seconds": round(time.perf_counter() - start)}
    return {"model": model.name, "draw": seed, "documents": [t.name for t in texts], **counts, "sides": sides}


def table(results: list[dict]) -> str:
    """Means over draws with intervals by document, the null in brackets; a column for every side of a model."""
    columns: dict[str, list[dict]] = {}
    for one in results:
        for side, found in one["sides"].items():
            name = f"{one['model']}, {side}" if len(one["sides"]) > 1 else one["model"]
            columns.setdefault(name, []).append(found | {"tokens": one["tokens"]})
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]

    def add(label: str, cell) -> None:
        lines.append(f"| {label} | " + " | ".join(cell(some) for some in columns.values()) + " |")

    add("draws, tokens", lambda some: f"{len(some)}, {sum(one['tokens'] for one in some):,}")
    everything = [one for some in columns.values() for one in some]
    for question in dict.fromkeys(question for one in everything for question in one["answers"]):
        add(f"**{question}**", lambda some, q=question: _answers(some, q))
    labels = dict.fromkeys(label for one in everything for label in one["values"])
    for label in labels:
        add(label, lambda some, name=label: _pooled(some, name))
    for name, pick in (("first", lambda w: w[0]), ("least", min), ("last", lambda w: w[-1])):
        add(f"W₂ to a Gaussian, {name} block", lambda some, p=pick: _laws(some, "law", p))
        add(f"— with random weights, {name} block", lambda some, p=pick: _laws(some, "null law", p))
    for kind in KINDS:
        lines += ["", f"| {kind} |" + " |" * len(columns), "|---" * (len(columns) + 1) + "|"]
        for label in labels:
            if any(label in one["kinds"].get(kind, {}) for one in everything):
                add(label, lambda some, name=label, k=kind: _spread([o["kinds"][k].get(name) for o in some]))
        for name, pick in (("first", lambda w: w[0]), ("least", min), ("last", lambda w: w[-1])):
            cell = lambda some, p=pick, k=kind: _laws([o["kinds law"] for o in some], k, p)  # noqa: E731
            add(f"W₂ to a Gaussian, {name} block", cell)
    return "\n".join([*lines, "", covered(columns), ""])


def _answers(draws: list[dict], question: str) -> str:
    """What the draws say, and in brackets what random weights get by the same rule."""
    said, null = (", ".join(dict.fromkeys(one[key].get(question, "–") for one in draws)) for key in BOTH)
    return f"{said} ({null})"


def _pooled(draws: list[dict], label: str) -> str:
    """Mean of the draws, whose documents differ: its error is √(Σ se²)/n."""
    values = [one["values"][label] for one in draws if label in one["values"]]
    if not values:
        return "–"
    nulls = [one["nulls"][label] for one in draws if label in one["nulls"]]
    errors = [one["intervals"][label][3] for one in draws if label in one["intervals"]]
    cell = f"{mean(values):.3g}"
    if len(errors) == len(values) and (error := sqrt(sum(e * e for e in errors)) / len(errors)) > 1e-12:
        cell += f" [{mean(values) - 1.96 * error:.3g}, {mean(values) + 1.96 * error:.3g}]"
    return cell + (f" ({_spread(nulls)})" if nulls else "")


def _spread(values: list[float | None]) -> str:
    """The mean, and from where to where the draws go if they differ."""
    there = [value for value in values if value is not None]
    if not there:
        return "–"
    ends = f"{min(there):.2g}", f"{max(there):.2g}"
    return f"{mean(there):.3g}" + ("" if ends[0] == ends[1] else f"; {ends[0]} to {ends[1]}")


def _laws(draws: list[dict], name: str, pick) -> str:
    ratios = [[ratio for ratio, _ in one[name]] for one in draws if one.get(name)]
    return _spread([pick(w) for w in ratios])


def covered(columns: dict[str, list[dict]]) -> str:
    """How often the interval of one draw holds the mean of the other draws, which has an error of its own."""
    inside = total = 0
    for draws in columns.values():
        for label in dict.fromkeys(label for one in draws for label in one["intervals"]):
            found = [one["intervals"][label] for one in draws if label in one["intervals"]]
            for i, (_, low, high, error) in enumerate(found):
                others = [value for j, (value, *_) in enumerate(found) if j != i]
                if others and error > 1e-12:
                    inside, total = inside + (low <= mean(others) <= high), total + 1
    return f"{inside} of {total} intervals of one draw hold the mean of the others."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="minilm, smollm2, whisper, gemma3")
    parser.add_argument("--draws", type=int, default=1, help="of documents, and of random weights")
    parser.add_argument("--documents", type=int, default=6, help="of each kind")
    parser.add_argument("--tokens", type=int, default=256, help="of each document, at most")
    parser.add_argument("--replicates", type=int, default=200, help="documents drawn again, for intervals")
    parser.add_argument("--no-null", action="store_true", help="without random weights")
    parser.add_argument("--force", action="store_true", help="read again what is there")
    parser.add_argument("--out", type=Path, default=Path("findings"), help="directory of the results")
    parser.add_argument("--table", type=Path, help="write a table of the results that are there, and read nothing")
    given = parser.parse_args()
    if given.table is not None:
        paths = [path for name in given.models for path in sorted(given.out.glob(f"{name}-*.json"))]
        if not paths:
            parser.error(f"{given.out} has no results of {', '.join(given.models)}: run without --table first")
        write(given.table, table([json.loads(path.read_text(encoding="utf-8")) for path in paths]))
        return
    given.out.mkdir(exist_ok=True)
    documents = given.out / "documents.json"  # the same for all models, whatever is installed meanwhile
    if not documents.is_file():
        write(documents, json.dumps(all_passages()))
    passages = json.loads(documents.read_text(encoding="utf-8"))
    for name in given.models:
        missing = [s for s in range(given.draws) if given.force or not (given.out / f"{name}-{s}.json").is_file()]
        model = without_language_head(load(name)) if missing else None
        for seed in missing:
            assert model is not None
            texts = [text for kind in KINDS for text in draw(kind, given.documents, seed, passages)]
            with tempfile.TemporaryDirectory() as room:
                texts = texts if model.features is None else list(spoken(texts, Path(room)))
                result = run(model, texts, seed, given.tokens, not given.no_null, given.replicates)
            write(given.out / f"{name}-{seed}.json", json.dumps(result, indent=1))
            print(f"{name}, draw {seed}: {result['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
