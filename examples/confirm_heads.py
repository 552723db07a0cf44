"""Do heads do elsewhere what they did where they were found? Other texts, other random heads, other random tokens.

The page of `cumulant observe` judges ten heads by rules that were written when one run had been seen. This removes the
same heads again, with the rules as they are, while the model reads documents of another kind; random heads and random
tokens come from another seed. Then it judges the random heads themselves, each against the others, as if they were of
the types of the ten: how many are confirmed that way is what a verdict is worth.

cumulant observe smollm2
python examples/confirm_heads.py observed/smollm2 --kinds licences code    # about three minutes for each
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from documents import KINDS, draw

from cumulant.observatory import load
from cumulant.observatory.models.load import Loaded
from cumulant.observatory.report.causes import CONFIRMED, judgements, random_heads_confirmed, read_causes
from cumulant.observatory.report.page.render import plain
from cumulant.observatory.runs.causes import head_effects


def remove_again(model: Loaded, types: dict[tuple[int, int], str], kind: str, seed: int, tokens: int) -> dict:
    """What causes.json holds, of the same heads on documents of a kind; help with seed 0 is not what observe reads."""
    start = time.perf_counter()
    effects = head_effects(model, draw(kind, 8, seed), list(types), max_tokens=tokens, seed=seed)
    rows = [row._asdict() | {"type": None if row.random else types[row.layer, row.head]} for row in effects.rows]
    print(f"{kind}, seed {seed}: {effects.tokens} tokens, {time.perf_counter() - start:.0f} s", flush=True)
    return plain(effects._asdict() | {"rows": rows, "reason": None})  # pyright: ignore[reportReturnType]


def table(runs: dict[str, dict], types: dict[tuple[int, int], str]) -> str:
    """Markdown: a row for each head, a column for each run; then how many random heads the same rules confirm."""
    judged = [{(j.layer, j.head): j for j in judgements(causes)} for causes in runs.values()]
    lines = [f"| head | type | {' | '.join(runs)} |", "|---|---|" + "---|" * len(runs)]
    for (layer, head), kind in types.items():
        cells = []
        for causes, found in zip(runs.values(), judged, strict=True):
            verdict = found[layer, head]
            key = layer, head, False, verdict.replacement, verdict.measure
            (row,) = [r for r in causes["rows"] if tuple(r[n] for n in COLUMNS) == key]
            cells.append(f"{'yes' if verdict.verdict == CONFIRMED else 'no'} ({row['effect']:+.2g})")
        lines.append(f"| {layer}.{head} | {kind} | {' | '.join(cells)} |")
    total = [sum(j.verdict == CONFIRMED for j in found.values()) for found in judged]
    lines.append(f"| confirmed | | {' | '.join(f'{n} of {len(types)}' for n in total)} |")
    for kind in dict.fromkeys(types.values()):
        shares = ["{} of {}".format(*random_heads_confirmed(causes, kind)) for causes in runs.values()]
        lines.append(f"| random heads, as {kind} | | {' | '.join(shares)} |")
    return "\n".join(lines)


COLUMNS = ("layer", "head", "random", "replacement", "measure")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what cumulant observe has written")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["licences", "code"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--first-seed", type=int, default=1, help="each kind of text has the next one")
    options = parser.parse_args()
    first = read_causes(options.directory)
    if first is None or not first["rows"]:
        parser.error(f"{options.directory} has no heads that were removed: run cumulant observe without --causes 0")
    types = {(r["layer"], r["head"]): r["type"] for r in first["rows"] if not r["random"]}
    meta = json.loads((options.directory / "record.json").read_text(encoding="utf-8"))["meta"]
    model = load(meta["model"])
    runs = {"first run": first}
    for seed, kind in enumerate(options.kinds, options.first_seed):
        runs[f"{kind}, seed {seed}"] = remove_again(model, types, kind, seed, options.tokens)
    print(table(runs, types))


if __name__ == "__main__":
    main()
