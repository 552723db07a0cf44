"""Directories of every kind: records whose files are broken in some way, and files of users under names like ours.

Whatever a directory holds, a command ends well or with one sentence; what a user put there has the same bytes
afterwards; and a command that is refused has changed nothing at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from tests.generated.properties import holds_for

observed = pytest.importorskip("tests.generated.observed")

from safetensors.torch import load_file, save_file  # noqa: E402

from cumulant.observatory.record.consistency import inconsistency  # noqa: E402
from cumulant.observatory.record.record import Record  # noqa: E402
from cumulant.observatory.record.tables import layer_rows, layer_spectra  # noqa: E402
from cumulant.observatory.statistics.states import unflatten  # noqa: E402

BASES = ("record", "old", "attached", "begun", "series")
FILES = {
    "record": ("record.json", "moments.safetensors", "null-random/record.json", "null-random/moments.safetensors")
    + ("ablation.json", "causes.json", "manifest.json", "null-random/manifest.json", "heads.parquet", "report.html"),
    "attached": ("record.json", "moments.safetensors", "manifest.json"),
    "begun": ("shards/plan.json", "SHARD/shard.json", "SHARD/record.json", "SHARD/moments.safetensors"),
    "series": ("series/settings.json", "series/step-000001/record.json", "series/step-000002/moments.safetensors")
    + ("series/step-000002/record.json", "manifest.json", "series.parquet"),
}
FILES["old"] = tuple(name for name in FILES["record"] if "manifest" not in name)
BYTES = ("cut", "empty", "zeros", "flip", "gone", "directory", "dangling", "not utf-8", "list", "deep")
VALUES = (None, True, -1, 0, 3, 1.5, float("nan"), "x", "[/]", [], [1], {}, {"a": []}, 10**400)
TENSORS = ("gone", "renamed", "fewer", "more axes", "transposed", "empty", "nan", "negative", "integers", "one number")
COMMANDS = ("report", "compare", "again", "force", "resume")
USERS = (
    *("notes.txt", "record.json", "moments.safetensors", "manifest.json", "report.html", "heads.parquet"),
    *(
        "causes.json",
        "causes.parquet",
        "ablation.json",
        "ablation.csv",
        "ablation.parquet",
        "series.parquet",
        "null-random",
        "shards",
    ),
    *("null-random/notes.txt", "null-random/record.json", "null-shuffled/thesis.tex", "null-hypothesis/record.json"),
    *(".shards-old/data.bin", ".shards-abc12345/moments.safetensors", "shards/plan.json", "shards/000001-of-2.bin"),
    *("shards/000000-0123456789abcdef/thesis.tex", "shards/until-000001/notes.txt", "shards/.git/config"),
    *("shards/.new-photos/1.jpg", "series/settings.json", "series/step-000001/record.json", "series/step-1/model.bin"),
    *(".record.json.swp", ".report.html.backup12", "shards/ended.json"),
)
CONTENTS = (b"mine", b"{}", b'{"format": "mine 1", "files": {}}', b"\xff\xfe\x00", b"")


@dataclass(frozen=True)
class Damage:
    """file, how, and where: a share of its bytes, of the entries of its JSON, or of its tensors; value by number."""

    file: int
    how: str
    where: float
    value: int = 0


@dataclass(frozen=True)
class User:
    name: str
    content: int


@dataclass(frozen=True)
class Broken:
    base: str
    damage: Damage
    command: str


@dataclass(frozen=True)
class Shared:
    base: str
    users: tuple[User, ...]
    command: str


def damages() -> st.SearchStrategy[Damage]:
    hows = [f"bytes: {how}" for how in BYTES] + ["json"] * 6 + [f"tensor: {how}" for how in TENSORS]
    return st.builds(
        Damage, st.integers(0, 8), st.sampled_from(hows), st.floats(0, 1, width=16), st.integers(0, len(VALUES) - 1)
    )


def broken() -> st.SearchStrategy[Broken]:
    return st.builds(Broken, st.sampled_from(BASES), damages(), st.sampled_from(COMMANDS))


def shared() -> st.SearchStrategy[Shared]:
    users = st.lists(st.builds(User, st.sampled_from(USERS), st.integers(0, len(CONTENTS) - 1)), min_size=1, max_size=3)
    return st.builds(Shared, st.sampled_from((*BASES, "empty")), users.map(tuple), st.sampled_from(COMMANDS))


def damage_file(place: Path, damage: Damage, base: str) -> Path:
    """Break one file of a copy; the hash that record.json has of its tensors is renewed, so that they are looked at."""
    names = FILES[base]
    path = place / names[damage.file % len(names)].replace("SHARD", f"shards/{shard_of(place)}")
    kind, _, how = damage.how.partition(": ")
    if kind == "json":
        path = path if path.suffix == ".json" else sorted(place.rglob("*.json"))[0]
        change_json(path, damage)
    elif kind == "tensor":
        path = path if path.suffix == ".safetensors" else next(p for p in sorted(place.rglob("moments.safetensors")))
        change_tensor(path, how, damage.where)
    else:
        change_bytes(path, how, damage.where)
    return path


def shard_of(place: Path) -> str:
    return next((p.name for p in sorted((place / "shards").glob("0*"))), "") if (place / "shards").is_dir() else ""


def change_bytes(path: Path, how: str, where: float) -> None:
    content = path.read_bytes()
    at = min(int(where * len(content)), len(content) - 1)
    changed = {
        "cut": content[:at],
        "empty": b"",
        "zeros": bytes(len(content)),
        "flip": content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :],
        "not utf-8": content[:at] + b"\xff\xfe" + content[at:],
        "list": b"[1, 2]",
        "deep": b"[" * 100_000,
    }
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "dangling":
        path.symlink_to(path.with_name("nowhere"))
    elif how != "gone":
        path.write_bytes(changed[how])


def change_json(path: Path, damage: Damage) -> None:
    plain = json.loads(path.read_text())
    places = list(entries(plain))
    holder, key = places[min(int(damage.where * len(places)), len(places) - 1)]
    holder[key] = VALUES[damage.value]
    path.write_text(json.dumps(plain))


def entries(plain):
    """Every entry of nested lists and dictionaries, outer ones first."""
    for key in list(plain) if isinstance(plain, dict) else range(len(plain)):
        yield plain, key
        if isinstance(plain[key], dict | list):
            yield from entries(plain[key])


CHANGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "renamed": lambda t: t,
    "fewer": lambda t: t[:-1] if t.ndim else t[None],
    "more axes": lambda t: t[None],
    "transposed": lambda t: t.mT if t.ndim > 1 else t[:, None] if t.ndim else t[None],
    "empty": lambda t: t.flatten()[:0],
    "nan": lambda t: t.double() * torch.nan,
    "negative": lambda t: -t.abs() - 1,
    "integers": lambda t: t.nan_to_num(0, 0, 0).long() if t.is_floating_point() else t.double(),
    "one number": lambda t: t.flatten()[0] if t.numel() else torch.zeros(()),
}


def change_tensor(path: Path, how: str, where: float) -> None:
    tensors = load_file(path)
    names = sorted(tensors)
    name = names[min(int(where * len(names)), len(names) - 1)]
    tensor = tensors.pop(name)
    if how != "gone":
        tensors[f"{name}x" if how == "renamed" else name] = CHANGED[how](tensor).contiguous()
    save_file(tensors, path, metadata={"format": "cumulant record 2"})
    beside = path.with_name("record.json")
    plain = json.loads(beside.read_text())
    if "moments" in plain:
        beside.write_text(json.dumps(plain | {"moments": hashlib.sha256(path.read_bytes()).hexdigest()}))


def put(place: Path, users: tuple[User, ...]) -> set[str]:
    """Put users' files into a place, over ours where those have their names; the names of those that are there."""
    names = set()
    for user in users:
        path = place / user.name
        folders = [p for p in path.parents if p.is_relative_to(place)]
        if any(p.exists() and not p.is_dir() for p in folders) or path.is_dir():
            continue
        if user.name == "shards/plan.json" and shard_of(place):
            continue  # the plan of a run whose shards are there is broken then, and may be begun anew
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(CONTENTS[user.content])
        names.add(user.name)
    return names


@holds_for(broken(), examples=14)
def test_a_broken_directory_gets_one_sentence_and_stays_as_it_is(case: Broken) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "out"
        shutil.copytree(observed.observed(case.base), place)
        damage_file(place, case.damage, case.base)
        before = observed.snapshot(place)
        ended = observed.run(case.command, place, case.base)
        observed.require_sentence(ended)
        assert ended.code in (0, 2), ended
        if ended.code:
            assert observed.snapshot(place) == before
        if case.command in ("report", "compare", "again"):
            left = observed.snapshot(place)
            kept = [key for key in before if key.endswith((".json", ".safetensors")) and "manifest" not in key]
            assert all(left[key] == before[key] for key in kept)


@holds_for(shared(), examples=10)
def test_what_a_user_put_into_a_directory_keeps_its_bytes(case: Shared) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "out"
        shutil.copytree(observed.observed(case.base), place)
        names = put(place, case.users)
        before = observed.snapshot(place)
        ended = observed.run(case.command, place, case.base)
        observed.require_sentence(ended)
        assert ended.code in (0, 2), ended
        left = observed.snapshot(place)
        assert {key: left.get(key) for key in names} == {key: before[key] for key in names}
        if ended.code:
            assert left == before


MUST = ("record.json", "moments.safetensors")


@pytest.mark.parametrize("how", ["cut", "empty", "zeros", "gone", "directory", "dangling", "not utf-8", "list", "deep"])
@pytest.mark.parametrize("name", MUST)
def test_a_record_that_cannot_be_read_is_refused(tmp_path, name, how):
    place = tmp_path / "out"
    shutil.copytree(observed.observed("record"), place)
    change_bytes(place / name, how, 0.5)
    for command in ("report", "compare"):
        ended = observed.run(command, place, "record")
        observed.require_sentence(ended)
        assert ended.code == 2
        assert str(place) in ended.said


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_any_changed_byte_of_the_tensors_is_noticed(tmp_path, where):
    place = tmp_path / "out"
    shutil.copytree(observed.observed("record"), place)
    change_bytes(place / "moments.safetensors", "flip", where)
    ended = observed.run("report", place, "record")
    observed.require_sentence(ended)
    assert ended.code == 2
    assert "is not the one that record.json was written with" in ended.said


@pytest.mark.parametrize("how", sorted(CHANGED.keys() - {"renamed"}))
def test_hidden_states_of_a_record_that_passes_can_be_tabled_and_merged(how):
    """Every tensor of vectors, changed in turn: the record is inconsistent, or its rows are made of it."""
    record = Record.load(observed.observed("record"))
    whole = unflatten(record.hidden)
    names = [key for key in record.hidden if not key.rpartition(":")[2].startswith("tally")]
    assert {key.rpartition(":")[2].partition(".")[0] for key in names} == {"spread", "within", "sample"}
    assert inconsistency(record) is None
    for key in names:
        hidden = record.hidden | {key: CHANGED[how](record.hidden[key])}
        if inconsistency(replace(record, hidden=hidden)) is None:
            layer_rows(hidden, record.meta.stages)
            layer_spectra(hidden, record.meta.stages)
            for place, kept in unflatten(hidden).items():
                kept.merge(whole[place])


def test_an_empty_directory_named_shards_makes_no_record(tmp_path):
    """Beside a user's files; alone it is what a run that was killed at once leaves, and --force begins anew."""
    text = observed.base() / "words.txt"
    (tmp_path / "mine" / "shards").mkdir(parents=True)
    (tmp_path / "mine" / "ablation.csv").write_text("mine")
    line = ("observe", observed.base() / "tiny", "--text", text, "--force", *observed.QUICK, "--out")
    ended = observed.call(*line, tmp_path / "mine")
    observed.require_sentence(ended)
    assert ended.code == 2
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["ablation.csv", "shards"]
    (tmp_path / "killed" / "shards").mkdir(parents=True)
    assert observed.call(*line, tmp_path / "killed").code == 0
