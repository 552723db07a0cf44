"""A model over its training: the same text read at every checkpoint, one record a step.

    DIR/step-000100, …     as `cumulant train` writes them
    DIR/checkpoint-100, …  as the Trainer of transformers does

The records lie in OUT/series/step-000100/. A step that is there stays, so that an interrupted series goes on, and one
whose training goes on grows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from cumulant.checks import sentence
from cumulant.files import write
from cumulant.observatory.models.load import Loaded, fingerprint_of, load, read_tokenizer
from cumulant.observatory.record.manifest import MOMENTS, PAGE, RECORD, remove, require_ours, writing
from cumulant.observatory.record.record import UNREADABLE, Record, claim_directory
from cumulant.observatory.runs.observe import Progress, observe
from cumulant.observatory.runs.settings import DEFAULT_STEP_TOKENS
from cumulant.observatory.text.corpus import Corpus, Text

STEP = re.compile(r"(?:step|checkpoint)-(\d+)")
STEP_RECORD = re.compile(r"step-\d{6,}")
SETTINGS = "settings.json"
SETTINGS_PATH = f"series/{SETTINGS}"  # in the manifest
OUTPUTS = ("series.parquet", PAGE)
# entries of a configuration that may differ between steps of one training
VARYING = {"step", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}


class CheckpointDirectory(NamedTuple):
    """A checkpoint on disk: the number of updates it has had, and its path."""

    number: int
    path: Path


class SeriesSettings(NamedTuple):
    """What the records of a series have in common, and what a series that goes on must have in common with itself.

    text        `Corpus.identity` of what is read
    model       sha256 of what the configurations of all steps agree on
    quantities, max_tokens, max_length, batch_size, seed, dtype   as in `observe` and `models.load`
    """

    text: str
    model: str
    quantities: tuple[str, ...] | None = None
    max_tokens: int = DEFAULT_STEP_TOKENS
    max_length: int = 256
    batch_size: int = 16
    seed: int = 0
    dtype: str | None = None


class Series(NamedTuple):
    """Records over training: step → record, in the order of steps; and whether all steps are there."""

    records: dict[int, Record]
    complete: bool


def find_steps(directory: str | Path) -> tuple[CheckpointDirectory, ...]:
    """The checkpoints in a directory, by their numbers; one sentence if there are none or two have one number."""
    directory = Path(directory).expanduser()
    if not directory.is_dir():
        got = f"the file {directory}" if directory.is_file() else f"no such directory {str(directory)!r}"
        raise ValueError(sentence("--checkpoints", "a directory with steps", got, "Check the path."))
    named = [
        CheckpointDirectory(int(m[1]), path) for path in sorted(directory.iterdir()) if (m := STEP.fullmatch(path.name))
    ]
    steps = sorted((step for step in named if step.path.is_dir()), key=lambda step: step.number)
    if not steps:
        expected, got = "step-N or checkpoint-N directories", f"none in {directory}"
        raise ValueError(sentence("--checkpoints", expected, got, _advice(directory)))
    for one, other in pairwise(steps):
        if one.number == other.number:
            got = f"{one.path.name} and {other.path.name}"
            raise ValueError(sentence("--checkpoints", "one directory a step", got, "Move one of them away."))
    return tuple(steps)


def _advice(directory: Path) -> str:
    """To name a directory further down, if there are steps in one."""
    below = (path.parent for path in sorted(directory.glob("*/*/step-*")) + sorted(directory.glob("*/checkpoint-*")))
    names = list(dict.fromkeys(str(path) for path in below))
    return f"Name one training: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}." if names else "Name another."


def agreed_model(steps: tuple[CheckpointDirectory, ...]) -> str:
    """sha256 of what the configurations of all steps say alike; steps of different models are refused."""
    configs = {step: _configuration(step) for step in steps}
    first = configs[steps[0]]
    for step, config in configs.items():
        other = sorted(key for key in first.keys() | config.keys() if first.get(key) != config.get(key))
        if other:
            got = f"{step.path.name} with another {', '.join(other[:3])} than {steps[0].path.name}"
            raise ValueError(sentence("--checkpoints", "steps of one training", got, "Put others elsewhere."))
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()


def _configuration(step: CheckpointDirectory) -> dict[str, Any]:
    path = step.path / "config.json"
    try:
        config = json.loads(path.read_bytes())
        return {key: value for key, value in config.items() if key not in VARYING}
    except FileNotFoundError:
        got = f"{step.path.name} without one"
    except UNREADABLE:
        got = f"{step.path.name} with one that cannot be read"
    raise ValueError(sentence("--checkpoints", "config.json in every step", got, "Complete the step, or move it away."))


def claim_series(output_dir: Path, settings: SeriesSettings, *, resume: bool, force: bool) -> None:
    """Prepare a directory for a series, or check that the one in it was made in the same way."""
    path = output_dir / "series" / SETTINGS
    if not path.is_file():
        claim_directory(output_dir)
    elif force:
        _delete_series(output_dir)
    elif resume:
        _require_same(path, settings)
        require_ours(output_dir, (*OUTPUTS, SETTINGS_PATH))
        return
    else:
        got, advice = f"{output_dir}, one with a series", "Pass --resume to go on with it, or --force to start anew."
        raise ValueError(sentence("--out", "a new or empty directory", got, advice))
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(output_dir, SETTINGS_PATH):
        write(path, json.dumps(settings._asdict(), indent=1) + "\n")


def _delete_series(output_dir: Path) -> None:
    """Delete what a series has written, and nothing else; all is checked before anything is deleted."""
    named = [path for path in sorted((output_dir / "series").iterdir()) if STEP_RECORD.fullmatch(path.name)]
    records = [path for path in named if path.is_dir()]
    require_ours(output_dir, (*OUTPUTS, SETTINGS_PATH))
    for path in records:
        require_ours(path, (MOMENTS, RECORD))
    for path in records:
        remove(path, (MOMENTS, RECORD))
    remove(output_dir, (*OUTPUTS, SETTINGS_PATH))


def abandon_series(output_dir: Path, *, existed: bool) -> None:
    """Delete a series that failed before its first step was read, so that a corrected one may begin."""
    series = output_dir / "series"
    if series.is_dir() and [path.name for path in series.iterdir()] == [SETTINGS]:
        with suppress(OSError, ValueError):  # what is not ours stays, and so do directories with others' files
            remove(output_dir, [SETTINGS_PATH])
            series.rmdir()
            if not existed:
                output_dir.rmdir()


def _require_same(path: Path, settings: SeriesSettings) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name, value in _plain(settings).items() if before[name] != value]
    except UNREADABLE:
        raise ValueError(sentence(str(path), "what a series wrote", "something else", "Pass --force.")) from None
    if different:
        name = different[0]
        now = getattr(settings, name)
        got = f"another {name}" if name in ("text", "model") else f"{name} {now} where it was {before[name]}"
        advice = "Leave the options as they were, name another --out, or pass --force to start anew."
        raise ValueError(sentence("--resume", "the settings of the series", got, advice))


def _plain(settings: SeriesSettings) -> dict:
    return json.loads(json.dumps(settings._asdict()))


# step, which, of how many → context manager of a Progress or None
Watch = Callable[[CheckpointDirectory, int, int], Any]


def observe_series(
    steps: tuple[CheckpointDirectory, ...],
    output_dir: Path,
    corpus: Corpus,
    settings: SeriesSettings,
    *,
    device: str = "cpu",
    allow_pickle: bool = False,
    meta: dict[str, Any] | None = None,
    watch: Watch | None = None,
) -> Series:
    """Observe the model of every step on the same text; each record is saved in ``output_dir`` before the next begins.

    meta   fields of `Meta` that all records have in common
    watch  called with each step before it is read, for a bar; gives a context manager around a `Progress`

    A step that is there must have the weights that it had. An interrupt (Ctrl-C) gives the steps that are finished.
    """
    records: dict[int, Record] = {}
    for which, step in enumerate(steps):
        path = output_dir / "series" / f"step-{step.number:06d}"
        record = _stored(path, step, allow_pickle)
        if record is None:
            with (watch or _silent)(step, which, len(steps)) as progress:
                record = _observe_step(step, corpus, settings, device, allow_pickle, progress)
            if not record.meta.complete:
                return Series(records, complete=False)
            replace(record, meta=replace(record.meta, **(meta or {}))).save(path)
            record = Record.load(path)  # as a run that goes on will see it
        require_alike(records, record, step)
        records[step.number] = record
    return Series(records, complete=True)


@contextmanager
def _silent(step: CheckpointDirectory, which: int, total: int) -> Iterator[Progress | None]:
    yield None


def _stored(path: Path, step: CheckpointDirectory, allow_pickle: bool) -> Record | None:
    if not (path / RECORD).is_file():
        return None
    record = Record.load(path)
    if record.meta.fingerprint != fingerprint_of(step.path, allow_pickle=allow_pickle):
        got, advice = f"{step.path.name} with others", "Pass --force to observe all steps anew."
        raise ValueError(sentence("--resume", "the weights that were observed", got, advice))
    return record


def _observe_step(
    step: CheckpointDirectory,
    corpus: Corpus,
    settings: SeriesSettings,
    device: str,
    allow_pickle: bool,
    progress: Progress | None,
) -> Record:
    loaded = load(step.path, device=device, dtype=settings.dtype, allow_pickle=allow_pickle)
    tokenizer = loaded.tokenizer or read_tokenizer(step.path.parent)
    if tokenizer is None:
        got = f"none in {step.path.name} or {step.path.parent}"
        raise ValueError(sentence("--checkpoints", "a tokenizer beside the model", got, "Save it there."))
    notes = tuple(note for note in loaded.notes if "no tokenizer" not in note)
    loaded = replace(loaded, tokenizer=tokenizer, name=step.path.name, notes=notes)
    read = hashlib.sha256()
    record = observe(
        loaded,
        _hashed(corpus.texts([]), read),
        quantities=settings.quantities,
        max_tokens=settings.max_tokens,
        max_length=min(settings.max_length, longest(loaded)),
        batch_size=settings.batch_size,
        seed=settings.seed,
        progress=progress,
        unreadable=[],
    )
    own = {"step": step.number, "text_hash": read.hexdigest()}
    return replace(record, meta=replace(record.meta, **own))


def _hashed(texts: Iterator[Text], into) -> Iterator[Text]:
    for text in texts:
        into.update(f"{text.index}\0{text.body}\0".encode())
        yield text


def require_alike(records: dict[int, Record], record: Record, step: CheckpointDirectory) -> None:
    """The same heads and the same text as at the first step."""
    first = next(iter(records.values()), record)
    same = {"heads": [layer[:4] for layer in first.modules] == [layer[:4] for layer in record.modules]}
    same["text"] = first.meta.text_hash == record.meta.text_hash
    for what, holds in same.items():
        if not holds:
            got, advice = f"another at {step.path.name}", "Pass --force to observe all steps anew."
            raise ValueError(sentence("--checkpoints", f"the {what} of the first step at all others", got, advice))


def longest(loaded: Loaded) -> int:
    """Tokens of the longest window that a model and its tokenizer take."""
    names = ("context", "max_position_embeddings", "n_positions")
    limits = [getattr(loaded.model.config, name, None) for name in names]
    limits.append(getattr(loaded.tokenizer, "model_max_length", None))
    return min((n for n in limits if isinstance(n, int) and n > 0), default=1 << 30)
