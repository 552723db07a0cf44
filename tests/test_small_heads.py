"""The tables of examples/small_heads.py, on made-up runs in which it is known what the entries follow."""

import re
import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "small_heads.py"))
LAYERS, KEY_HEADS, GROUPS = 10, 3, 2
BUDGETS = ("norepeat 0.25", "norepeat 0.125", "repeat 0.25", "repeat 0.125")


@pytest.fixture
def runs():
    """Four documents: entries grow with what a head writes over the stream, induction heads get the most."""
    generator = torch.Generator().manual_seed(0)
    n = LAYERS * KEY_HEADS
    out = []
    writes = torch.rand(n, generator=generator).double()
    for document in range(4):
        numbers = {name: torch.rand(n, generator=generator).tolist() for name in SCRIPT["NAMES"]}
        stream = 1 + document + torch.arange(LAYERS).repeat_interleave(KEY_HEADS).double()
        numbers |= {"stream": stream.tolist(), "written": (writes * stream).tolist()}
        numbers |= {"depth": torch.arange(LAYERS).repeat_interleave(KEY_HEADS).tolist()}
        numbers |= {"left": torch.rand(n, generator=generator).tolist(), "whole": [2.0] * n}
        entries = (100 * writes + document).round()
        types = ["sink" if head % 5 == 0 else "" for head in range(GROUPS * n)]
        most = int(writes.argmax()) * GROUPS
        types[most] = types[most] or "induction"
        out.append(
            {
                "document": document,
                "kind": ("prose", "code")[document % 2],
                "groups": GROUPS,
                "entries": dict.fromkeys(BUDGETS, entries.tolist()),
                "numbers": numbers,
                "types": types,
            }
        )
    return out


def cells(table: str, label: str) -> list[str]:
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {label}")]
    return re.split(r" (?<!\\)\| ", row)[1:]


def test_what_entries_follow_has_rank_correlation_one_and_noise_lies_in_the_null(runs):
    table = SCRIPT["tables"](runs)
    assert cells(table, SCRIPT["NAMES"]["written"])[0].split()[0] == "+1.00"
    one, largest = (float(x) for x in cells(table, "null")[0].split(";"))
    assert 0.3 < one < largest < 0.8  # of 30 key heads
    noise = abs(float(cells(table, SCRIPT["NAMES"]["previous"])[0].split()[0]))
    assert noise < largest
    assert float(cells(table, "R² of all together")[0]) > 0.95


def test_documents_that_agree_have_stable_budgets(runs):
    table = SCRIPT["tables"](runs)
    assert cells(table, "norepeat 0.25")[0].split(",")[0].strip() == "1.00"
    assert cells(table, "norepeat 0.25")[3].strip() == "1.00"


def test_the_largest_and_the_smallest_key_heads_are_named_with_their_types(runs):
    rows = list(SCRIPT["extremes"](runs, "norepeat 0.25", 2))[2:]
    means = torch.tensor([run["entries"]["norepeat 0.25"] for run in runs]).mean(0)
    named = [row.split("|")[1].strip() for row in rows]
    order = [*means.argsort()[:2].tolist(), *means.argsort().flip(0)[:2].tolist()]
    assert named == [f"{k // KEY_HEADS}.{k % KEY_HEADS}" for k in order]
    assert "induction" in rows[2] or "sink" in rows[2]


def test_ranks_share_ties_as_spearman_has_them():
    a, b = torch.tensor([1.0, 1.0, 2.0, 5.0, 4.0]), torch.tensor([3.0, 1.0, 2.0, 4.0, 4.0])
    assert SCRIPT["ranks"](a).tolist() == [1.5, 1.5, 3.0, 5.0, 4.0]
    pearson = torch.corrcoef(torch.tensor([[1.5, 1.5, 3, 5, 4], [3, 1, 2, 4.5, 4.5]]))[0, 1]
    assert float(SCRIPT["rank_correlation"](a, b)) == pytest.approx(float(pearson), abs=1e-6)


def test_what_depth_alone_gives_is_gone_within_layers():
    generator = torch.Generator().manual_seed(1)
    depth = torch.arange(200.0).repeat_interleave(KEY_HEADS)
    a, b = (depth + 0.1 * torch.rand(600, generator=generator) for _ in range(2))
    assert float(SCRIPT["rank_correlation"](a, b)) > 0.99
    assert abs(float(SCRIPT["within_layers"](a, b, KEY_HEADS))) < 0.1
