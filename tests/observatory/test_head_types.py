"""Types of heads: the rules, the usual induction test, and a model that is trained until such heads appear."""

from __future__ import annotations

import pytest
import torch

from cumulant.observatory import attach
from cumulant.observatory.record.rows import HeadRow, TokenStatistics
from cumulant.observatory.record.tables import head_rows
from cumulant.observatory.runs.repeated import repeated_induction, repeated_tokens
from cumulant.observatory.statistics.head_types import (
    HEAD_TYPES,
    Remarkable,
    head_types,
    heads_to_remove,
    remarkable_heads,
)
from tests.observatory.induction_model import LENGTH, VOCABULARY, trained_model, untrained_model
from tests.observatory.tiny_models import make, transformer


def head(layer: int = 0, number: int = 0, **values: float) -> HeadRow:
    """A head with these means; what has no column of its own over tokens is a number."""
    numbers = {
        name: x for name, x in values.items() if name.endswith("_chance") or name.startswith(("distance", "rep"))
    }
    means = {name: TokenStatistics(x, 0.1) for name, x in values.items() if name not in numbers}
    return HeadRow(layer, number, quantities=means, numbers=numbers)


@pytest.mark.parametrize(
    ("values", "types"),
    [
        ({}, []),
        ({"previous_mass": 0.92}, ["previous-token", "positional"]),
        ({"previous_mass": 0.39}, []),
        ({"induction_mass": 0.5, "induction_mass_chance": 0.05}, ["induction"]),
        ({"induction_mass": 0.5, "induction_mass_chance": 0.2}, []),
        ({"repeated_induction": 0.6, "induction_mass": 0.5, "induction_mass_chance": 0.05}, ["induction"]),
        ({"same_token_mass": 0.3, "same_token_mass_chance": 0.05}, ["duplicate-token"]),
        ({"first_mass": 0.7}, ["sink"]),
        ({"delimiter_mass": 0.7, "delimiter_mass_chance": 0.2}, ["delimiter"]),
        ({"delimiter_mass": 0.7, "delimiter_mass_chance": 0.5}, []),
        ({f"distance_{x}": 0.2 for x in ("0", "1", "2", "3_4")}, ["local"]),
        ({"kl_to_base": 0.01}, ["broad"]),
        ({"previous_mass": float("nan"), "kl_to_base": float("nan")}, []),
    ],
)
def test_rules(values, types):
    assert [kind.name for kind in head_types(head(**values))] == types


def test_every_rule_names_its_threshold():
    assert all(f"{kind.threshold:g}" in kind.rule for kind in HEAD_TYPES)
    assert all(f"{kind.times:g} × chance" in kind.rule for kind in HEAD_TYPES if kind.times)


def test_the_clearest_heads_come_first_with_a_sentence():
    rows = [head(0, 0, previous_mass=0.5, entropy=1.0), head(0, 1, previous_mass=0.92, entropy=0.31), head(1, 0)]
    nulls = [{"random": head(previous_mass=0.1)}, {"random": head(previous_mass=0.05)}, {}]
    found = remarkable_heads(rows, nulls)
    assert [(x.layer, x.head, x.kind) for x in found] == [(0, 1, "previous-token"), (0, 0, "previous-token")]
    assert found[0].words == (
        "looks at the previous token with 92% of its attention (random weights 5%); entropy 0.31 nats."
    )


def test_the_best_two_of_the_types_that_anyone_asks_for_are_removed():
    kinds = ["self", "local", "self", "broad", "sink", "self", "induction", "sink", "sink", "previous-token"]
    heads = [Remarkable(0, i, kind, "", "", 1 - i / 20) for i, kind in enumerate(kinds)]
    assert heads_to_remove(heads, 10) == heads
    assert [h.head for h in heads_to_remove(heads, 6)] == [0, 1, 4, 6, 7, 9]
    assert [h.head for h in heads_to_remove(heads, 2)] == [6, 9]
    assert heads_to_remove([], 10) == []


def test_heads_that_do_less_than_a_null_are_not_named():
    assert remarkable_heads([head(first_mass=0.6)], [{"random": head(first_mass=0.7)}]) == []


def test_repeated_tokens_repeat_and_leave_out_what_is_excluded():
    ids = repeated_tokens(30, length=10, sequences=5, seed=1, excluded=(0, 3))
    assert torch.equal(ids[:, :10], ids[:, 10:])
    assert not torch.isin(ids, torch.tensor([0, 3])).any()
    assert all(len(set(row[:10].tolist())) == 10 for row in ids)
    with pytest.raises(ValueError, match=r"repeated_tokens\.length"):
        repeated_tokens(5, length=10)


def test_the_test_for_induction_is_the_mass_a_length_before():
    model = transformer("llama", heads=4, key_heads=2, head_dim=4, layers=2, seed=0)
    found = repeated_induction(model, length=12, sequences=3, seed=5)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(repeated_tokens(50, length=12, sequences=3, seed=5), output_attentions=True).attentions
    for mean, table in zip(found.values(), weights, strict=True):
        diagonal = table.diagonal(offset=-11, dim1=-2, dim2=-1)[..., 1:]  # of the second copy
        torch.testing.assert_close(mean, diagonal.double().mean((0, 2)), rtol=0, atol=1e-6)


def test_a_model_without_tokens_is_refused():
    with pytest.raises(ValueError, match="a model that reads token ids"):
        repeated_induction(make("vit"))


@pytest.mark.long
def test_a_model_trained_on_repeated_sequences_has_previous_token_and_induction_heads():
    """Two layers: the first moves the previous token along, the second looks for it (and random weights do neither)."""
    before = repeated_induction(untrained_model(), length=LENGTH)
    assert max(float(mean.max()) for mean in before.values()) < 0.2
    model, loss = trained_model()
    ids = repeated_tokens(VOCABULARY, length=LENGTH, sequences=16, seed=1)
    quantities = ("cheap", "targets", "first_mass", "kl_to_base")
    with attach(model, quantities, hidden_states=False) as recorder, torch.no_grad():
        model(ids)
    rows = head_rows(recorder.record(weights=False))
    types = {(row.layer, row.head): [kind.name for kind in head_types(row)] for row in rows}
    assert loss < 0.5
    assert any("previous-token" in types[0, h] for h in range(4)), types
    assert any("induction" in types[1, h] for h in range(4)), types
