"""The table and the figure of docs/findings.md, "Over training": several trainings of several kinds of model, observed.

    cumulant train language --seeds 3 --out trained
    for seed in 0 1 2; do
      cumulant observe --checkpoints trained/standard/seed-$seed --out observed/standard/seed-$seed    # and convex
    done
    python examples/over_training.py observed/standard observed/convex --figure over-training.svg

Each argument is a directory of directories, one for each seed, that `cumulant observe --checkpoints` has written.
"""

import argparse
import sys
from pathlib import Path

import polars as pl

from cumulant.figures import COLOURS, figure, save

HEADS = {
    "entropy": "entropy of a head, nats",
    "effective_atoms": "effective keys",
    "log_normalizer": "log-normalizer",
    "condensed": "head–token pairs that have condensed",
    "first_mass": "attention on the first token",
    "gradientness": "cos(W_O W_V, W_Qᵀ W_K)",
    "ascent_index": "ascent index",
    "link_r2": "R² of the linear link",
    "gaussian_r2": "R² of one Gaussian in place of the keys",
}
STATES = {"sliced_w2": "sliced W₂ to a Gaussian after the last block", "effective_rank": "effective rank there"}
DRAWN = ("entropy", "log_normalizer", "ascent_index", "effective_rank")


def read(place: Path) -> pl.DataFrame:
    """One row for each seed, step and quantity: means over heads, and the states after the last block."""
    parts = []
    for path in sorted(place.glob("*/series.parquet")):
        rows = pl.read_parquet(path).filter(pl.col("value").is_finite())
        heads = rows.filter(pl.col("quantity").is_in(list(HEADS)) & pl.col("head").is_not_null())
        last = rows.filter(pl.col("quantity").is_in(list(STATES)) & (pl.col("stage") == "out"))
        last = last.filter(pl.col("name") == last["name"][-1])
        both = pl.concat([heads, last]).group_by("step", "quantity").agg(pl.col("value").mean())
        parts.append(both.with_columns(seed=pl.lit(path.parent.name)))
    if not parts:
        sys.exit(f"{place}: expected */series.parquet, got none. Run `cumulant observe --checkpoints` first.")
    return pl.concat(parts).sort("step")


def table(found: dict[str, pl.DataFrame]) -> str:
    """Markdown: first, middle and last step of each model, mean ± deviation over seeds."""
    columns = []
    for name, rows in found.items():
        steps = rows["step"].unique().sort().to_list()
        columns += [(name, step) for step in dict.fromkeys((steps[0], steps[-3], steps[-1]))]
    lines = ["| | " + " | ".join(f"{name}, step {step}" for name, step in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    for key, title in (HEADS | STATES).items():
        numbers = [_written(found[name].filter(quantity=key, step=step)["value"]) for name, step in columns]
        lines.append(f"| {title} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def _written(values: pl.Series) -> str:
    if not len(values):
        return "–"
    spread = values.std() if len(values) > 1 else None
    return f"{values.mean():.3g}" + ("" if spread is None else f" ± {spread:.2g}")


def draw(found: dict[str, pl.DataFrame]):
    """Means over seeds, with a band from the least to the greatest."""
    drawn = figure(3.1 * len(DRAWN), 3.0)
    for panel, key in zip(drawn.subplots(1, len(DRAWN)), DRAWN, strict=True):
        for colour, (name, rows) in zip(COLOURS, found.items(), strict=False):
            some = (
                rows.filter(quantity=key)
                .group_by("step")
                .agg(
                    pl.col("value").mean().alias("mean"),
                    pl.col("value").min().alias("low"),
                    pl.col("value").max().alias("high"),
                )
            )
            some = some.sort("step")
            panel.plot(some["step"], some["mean"], "o-", markersize=3, color=colour, label=name)
            panel.fill_between(some["step"], some["low"], some["high"], color=colour, alpha=0.2, linewidth=0)
        panel.set_xscale("symlog", linthresh=1)
        panel.set(xlabel="step", title=(HEADS | STATES)[key].replace(" there", " after the last block"))
    drawn.axes[0].legend()
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "places", nargs="+", type=Path, help="directories of observed seeds, one for each kind of model"
    )
    parser.add_argument("--figure", type=Path, help="where the figure goes, .svg or .png")
    given = parser.parse_args()
    found = {place.name: read(place) for place in given.places}
    print(table(found))
    if given.figure is not None:
        save(draw(found), given.figure)


if __name__ == "__main__":
    main()
