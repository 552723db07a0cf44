"""Records of every format that was ever written: stored samples, with the tables that were made of them at the
time, under the present names of columns."""

import json
import math
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="install cumulant[hf] to read records")

from cumulant.observatory.record import Record
from cumulant.observatory.record.meta import Meta
from cumulant.observatory.record.record import FORMAT, NO_SAMPLE
from cumulant.observatory.record.rows import HeadRow
from cumulant.observatory.record.tables import DISTANCES, Tables

SAMPLES = Path(__file__).parent.parent / "data" / "records"


@pytest.fixture(params=[2, 3])
def stored(request, tmp_path):
    """(format, directory) of a sample."""
    with zipfile.ZipFile(SAMPLES / f"format-{request.param}.zip") as sample:
        sample.extractall(tmp_path)
    return request.param, tmp_path


def test_a_stored_record_gives_the_tables_it_gave(stored):
    number, directory = stored
    tables = Tables.of(Record.load(directory))
    before = json.loads((directory / "tables.json").read_text())
    # since format 3 the rank is corrected for the number of tokens, and distances are about the means of sequences;
    # since format 4 the error of local linear reconstruction is a trimmed mean
    ranks = ("effective_rank", "participation_ratio", "sampled", "reconstructed", "gaussian_rank", "mardia_dim")
    changed = (*ranks, *DISTANCES) if number == 2 else ("lle_error",)
    compared = 0
    for rows, name in ((tables.heads, "heads"), (tables.layers, "layers")):
        for row, old in zip(rows, before[name], strict=True):
            columns = row.columns()
            for key, value in old.items():
                if key == "link_r2" and isinstance(
                    row, HeadRow
                ):  # since then less what as many slopes explain by chance
                    assert row.link_queries is not None
                    assert row.link_needed is not None
                    n, slopes = row.link_queries, (row.link_needed - 1) // 2
                    assert columns[key] == pytest.approx(1 - (1 - value) * (n - 1) / (n - slopes - 1), rel=1e-12)
                elif not key.startswith(changed):
                    assert columns[key] == value, key
                    compared += 1
    assert compared > 150


def test_what_a_stored_record_says_of_itself(stored):
    number, directory = stored
    record = Record.load(directory)
    assert (record.meta.tokens, record.meta.unreadable, record.meta.dimension) == (384, 1, 8)
    assert record.meta.unreadable_documents == ({"name": "lines.jsonl:0", "reason": "no JSON object"},)
    assert [stage.stage for stage in record.meta.stages] == ["in", "attention", "out", "norm ln_1", "norm ln_2"]
    assert {row.layer for row in Tables.of(record).layers} == {0}
    assert (NO_SAMPLE in record.meta.notes) == (number == 2)
    assert any(":sample." in key for key in record.hidden) == (number == 3)
    assert len(record.excerpts) == 4
    assert record.excerpts[0].values["entropy"]["transformer.h.0.attn"].shape == (2, 24)


def test_a_stored_record_is_saved_in_the_present_format_and_merges_with_itself(stored, tmp_path):
    record = Record.load(stored[1])
    record.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "record.json").read_text())["format"] == FORMAT
    again = Record.load(tmp_path / "again")
    assert again.meta == record.meta
    assert again.tensors().keys() == record.tensors().keys()
    assert all(torch.equal(tensor, record.tensors()[key]) for key, tensor in again.tensors().items())
    merged = record.merge(again)
    assert merged.meta.tokens == 768
    assert merged.tallies["transformer.h.0.attn/entropy"].count.tolist() == [768, 768]


def test_every_field_of_meta_is_checked():
    right = Meta().to_json()
    assert Meta.from_json(right) == Meta()
    assert Meta.from_json(right | {"added later": 1}) == Meta()
    for name in (field.name for field in fields(Meta)):
        with pytest.raises(ValueError, match=rf"meta\.{name} is "):
            Meta.from_json(right | {name: math.inf})


def test_merging_keeps_what_either_says():
    one, other = Meta(model="a", tokens=1, notes=("x",)), Meta(model="b", text="t", tokens=2, complete=False)
    assert one.merge(other) == Meta(model="a", text="t", tokens=3, notes=("x",), complete=False)
    here, there = Meta(undefined={"a": "no head", "b": "no repeat"}), Meta(undefined={"a": "no head", "c": "no order"})
    assert here.merge(there).undefined == {"a": "no head"}  # the others have numbers in one of the two


def test_columns_follow_one_scheme_and_tables_can_be_joined(tmp_path):
    with zipfile.ZipFile(SAMPLES / "format-3.zip") as sample:
        sample.extractall(tmp_path)
    record, heads, layers = Tables.of(Record.load(tmp_path))
    suffixes = ("std", "se", "count", "p05", "p25", "p50", "p75", "p95")
    tokens = ["entropy", "log_normalizer", "k90_share"]
    numbers = ["gradientness", "ascent_index", "gaussian_r2", "link_r2", "link_slope_error"]
    nulls = [f"{name}_null_random" for name in (*tokens, *numbers)]
    spreads = [f"{name}_{suffix}" for name in tokens for suffix in suffixes]
    about = ["layer", "head", "name", "block", "kind", "hopfield_class", "head_types", "link_queries", "link_needed"]
    row = heads[1].columns({"random": heads[0]})
    assert set(row) == {*about, *tokens, *spreads, *numbers, *nulls}
    assert row["entropy_null_random"] == heads[0].value("entropy")
    for name in ("rms", "cosine_to_mean", "pairwise_cosine", "growth", "step", "inverse", "contraction"):
        assert {name, *(f"{name}_{suffix}" for suffix in suffixes)} <= set(layers[0].columns())
    for name in DISTANCES:
        assert {name, *(f"{name}_{suffix}" for suffix in ("null", "null_low", "null_high"))} <= set(layers[0].columns())
    assert {(row.layer, row.block) for row in heads} == {(row.layer, row.block) for row in layers}
    assert record.modules[0].name.startswith(heads[0].block)
