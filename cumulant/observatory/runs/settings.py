"""Settings of an observation: the options of `cumulant observe`, and the description by which --resume knows a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cumulant.checks import sentence
from cumulant.files import versions
from cumulant.observatory.models.load import Loaded, load, random_twin
from cumulant.observatory.record.record import NULLS
from cumulant.observatory.runs.defaults import (
    DEFAULT_CAUSES_TOKENS,
    DEFAULT_MAX_TOKENS,
    DEFAULT_MODEL,
    DEFAULT_STEP_TOKENS,
    DEFAULT_TEXT,
)
from cumulant.observatory.statistics.heads import select_quantities
from cumulant.observatory.text.corpus import Corpus, plan

MIN_TOKENS = 16
FORMAT = "cumulant shards 3"


class ObservationSettings(NamedTuple):
    """Everything but the text that the numbers of an observation depend on, as plain data.

    model, device, dtype, allow_pickle        as in `models.load`; dtype by name
    quantities, max_length, batch_size, seed  as in `observe`
    null                                      None, "random" (weights) or "shuffled" (keys)
    exact_depth                               as in `observe`

    >>> ObservationSettings("minilm").null is None
    True
    """

    model: str
    device: str = "cpu"
    dtype: str | None = None
    allow_pickle: bool = False
    quantities: tuple[str, ...] | None = None
    max_length: int = 256
    batch_size: int = 16
    seed: int = 0
    null: str | None = None
    exact_depth: bool = False

    def load(self) -> Loaded:
        """The model that is observed: for the null "random" its twin with other weights."""
        return self.with_null(load(self.model, **self.load_options()))

    def load_options(self) -> dict[str, Any]:
        """Arguments of `models.load` beside the model."""
        return {"device": self.device, "dtype": self.dtype, "allow_pickle": self.allow_pickle}

    def with_null(self, loaded: Loaded) -> Loaded:
        """The model that is observed, from one that is in memory."""
        if self.null != "random":
            return loaded
        writer = None if loaded.features is None else loaded.model  # random weights write nothing of what they hear
        return replace(loaded, model=random_twin(loaded, self.seed), transcriber=writer)


@dataclass(frozen=True)
class Settings:
    """The options of `cumulant observe`; options that contradict each other are refused, one sentence each.

    observation    model, quantities, windows, seed
    sources        files, directories, URIs, or "-"; Python's own help if none
    prompts        passages to read in the place of sources
    audio          WAV files or directories of them, for a model that reads speech
    transcripts    what is said in each recording; the model writes it if none
    column         of JSONL and Parquet that holds the text; found if None
    out            directory of tables and page; `directory` if None
    checkpoints    directory of checkpoints: observe a model over its training
    max_tokens     where to stop; 0: read everything; None: the default
    nulls          names of nulls as they were asked for; both if empty
    ablation       "gaussian" or "mixture": replace every head by that
    causes         tokens on which heads that stand out are removed; 0: none are; None: the default
    resume, force  continue the run in the directory; replace it
    shard_bytes    of text in a shard; None: 1/256 of it
    ray, workers   address of a Ray cluster, and how many models read at once on it
    """

    observation: ObservationSettings
    sources: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()
    transcripts: tuple[str, ...] = ()
    column: str | None = None
    out: Path | None = None
    checkpoints: Path | None = None
    max_tokens: int | None = None
    nulls: tuple[str, ...] = ()
    ablation: str | None = None
    causes: int | None = None
    resume: bool = False
    force: bool = False
    shard_bytes: int | None = None
    ray: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        select_quantities(self.observation.quantities)
        null_names(self.nulls)
        for message in self._contradictions():
            raise ValueError(message)

    @property
    def directory(self) -> Path:
        """Where tables and page go: observed/NAME unless ``out`` is given."""
        if self.out is not None:
            return self.out
        name = Path(self.observation.model).name if self.checkpoints is None else training_name(self.checkpoints)
        return Path("observed") / name

    @property
    def text_name(self) -> str:
        return ", ".join(self.sources or self.audio or map(quoted, self.prompts)) or DEFAULT_TEXT

    @property
    def token_limit(self) -> int | None:
        """Tokens to read, of one checkpoint if there are several; None: all."""
        default = DEFAULT_MAX_TOKENS if self.checkpoints is None else DEFAULT_STEP_TOKENS
        return (default if self.max_tokens is None else self.max_tokens) or None

    @property
    def causes_tokens(self) -> int:
        """Tokens on which heads that stand out are removed; 0: none are."""
        if self.reads_stdin or self.checkpoints is not None:
            return 0
        return DEFAULT_CAUSES_TOKENS if self.causes is None else self.causes

    def corpus(self) -> Corpus:
        """The texts in shards; not of standard input, which is read once."""
        spoken = {"audio": self.audio, "transcripts": self.transcripts}
        return plan(self.sources, prompts=self.prompts, **spoken, column=self.column, shard_bytes=self.shard_bytes)

    @property
    def reads_stdin(self) -> bool:
        return "-" in self.sources

    def _contradictions(self) -> Iterator[str]:
        if self.ablation not in (None, "gaussian", "mixture"):
            yield sentence("--ablate", "gaussian or mixture", repr(self.ablation), "Choose one of them.")
        if self.max_tokens is not None and 0 < self.max_tokens < MIN_TOKENS:
            expected = f"0 for everything, or at least {MIN_TOKENS}"
            yield sentence("--max-tokens", expected, self.max_tokens, "Raise it.")
        if self.causes is not None and 0 < self.causes < MIN_TOKENS:
            expected = f"0 for none, or at least {MIN_TOKENS}"
            yield sentence("--causes", expected, self.causes, "Raise it.")
        if self.prompts and self.sources:
            yield sentence("--prompt", "no --text beside it", "both", "Leave one of them out.")
        if self.transcripts and not self.audio:
            yield sentence("--transcript", "--audio beside it", "none", "Give the recording that it is of.")
        if self.audio:
            yield from self._audio_contradictions()
        if self.resume and self.force:
            advice = "The one goes on with a run, the other starts anew."
            yield sentence("--resume", "no --force beside it", "both", advice)
        if self.workers is not None and self.ray is None:
            yield sentence("--workers", "--ray beside it", "none", "This process alone reads with one model.")
        if self.checkpoints is not None:
            yield from self._checkpoint_contradictions()
        elif self.reads_stdin:
            twice = {
                "--ablate": self.ablation,
                "--causes": self.causes,
                "--resume": self.resume,
                "--ray": self.ray,
                "--column": self.column,
                "--shard-bytes": self.shard_bytes,
                "--null": self.nulls and null_names(self.nulls),
            }
            for option in (option for option, value in twice.items() if value):
                yield sentence(option, "texts that can be read twice", "standard input", "Give a file.")

    def _audio_contradictions(self) -> Iterator[str]:
        alone = {
            "--text": self.sources,
            "--prompt": self.prompts,
            "--checkpoints": self.checkpoints,
            "--ablate": self.ablation,
            "--causes": self.causes,
            "--ray": self.ray,
            "--column": self.column,
            "--shard-bytes": self.shard_bytes,
        }
        for option in (option for option, value in alone.items() if value):
            yield sentence(option, "no --audio beside it", "both", "Leave one of them out.")

    def _checkpoint_contradictions(self) -> Iterator[str]:
        alone = {
            "MODEL": self.observation.model != DEFAULT_MODEL,
            "--null": self.nulls and null_names(self.nulls),
            "--ablate": self.ablation,
            "--causes": self.causes,
            "--ray": self.ray,
            "--shard-bytes": self.shard_bytes,
            "--exact-depth": self.observation.exact_depth,
        }
        for option in (option for option, value in alone.items() if value):
            advice = "Leave it out; a single step can be observed with it."
            yield sentence(option, "no --checkpoints beside it", "both", advice)
        if self.reads_stdin:
            expected, got = "texts that can be read at every step", "standard input"
            yield sentence("--checkpoints", expected, got, "Give a file.")
        if self.max_tokens == 0:
            advice = "Every step reads the same part of the text; say how much."
            yield sentence("--max-tokens", "a number of tokens with --checkpoints", 0, advice)


def null_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The nulls to observe: both by default, none for "none"."""
    for name in names:
        if name not in (*NULLS, "none"):
            raise ValueError(sentence("--null", "random, shuffled or none", repr(name), "Pick from them."))
    others = tuple(dict.fromkeys(name for name in names if name != "none"))
    if others and "none" in names:
        got = f"{', '.join(others)} beside it"
        raise ValueError(sentence("--null", "none alone", got, "Leave one of them out."))
    return others if names else NULLS


def quoted(passage: str) -> str:
    """The beginning of a passage, as the name of what was read.

    >>> quoted("to be or not to be"), quoted("word " * 20)
    ('“to be or not to be”', '“word word word word word word word word…”')
    """
    words = " ".join(passage.split())
    return f"“{words}”" if len(words) <= 40 else f"“{words[:40].rstrip()}…”"


def training_name(checkpoints: Path) -> str:
    """What a training is called, by the directory of its checkpoints.

    >>> training_name(Path("trained/language/convex/seed-0"))
    'convex-seed-0'
    """
    whole = checkpoints.resolve()
    return f"{whole.parent.name}-{whole.name}" if whole.name.startswith("seed-") else whole.name


def describe_run(corpus: Corpus, observation: ObservationSettings, fingerprint: str, max_tokens: int | None) -> dict:
    """Everything that a run depends on, except the contents of its files, as plain data for JSON."""
    packages = versions("torch", "transformers", "tokenizers")
    return {
        "format": FORMAT,
        "column": corpus.column,
        "files": [[str(path), size] for path, size in corpus.files],
        "shards": len(corpus.shards),
        "corpus": corpus.identity(),
        "fingerprint": fingerprint,
        "settings": json.loads(json.dumps(observation._asdict() | {"max_tokens": max_tokens})),
        "versions": {name: version for name, version in packages.items() if name != "python"},
    }


def description_hash(description: dict) -> str:
    """sha256 of the description of a run."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def difference(before: dict, now: dict) -> str | None:
    """The first difference of two descriptions in words, with both values; None if they agree.

    >>> base = {"format": FORMAT, "column": None, "files": [["a.txt", 3]], "shards": 1, "corpus": "", "fingerprint": ""}
    >>> difference(base, base | {"files": [["a.txt", 4]]})
    'another size of a.txt (3 bytes before, 4 now)'
    """
    if before["format"] != now["format"]:
        return f"another format ({before['format']} before, {now['format']} now)"
    if before["column"] != now["column"]:
        return _both("another --column", before["column"], now["column"])
    if before["files"] != now["files"]:
        return _file_difference(before["files"], now["files"])
    if before["corpus"] != now["corpus"]:
        return _both("other borders of shards, as of another --shard-bytes", before["shards"], now["shards"])
    if before["fingerprint"] != now["fingerprint"]:
        return _both("other weights", f"sha256 {before['fingerprint'][:12]}…", f"sha256 {now['fingerprint'][:12]}…")
    for part, words in (("settings", "another --"), ("versions", "another version of ")):
        old, new = before.get(part, {}), now.get(part, {})
        for name in dict.fromkeys((*new, *old)):
            if old.get(name) != new.get(name):
                option = name.replace("_", "-") if part == "settings" else name
                return _both(words + option, old.get(name), new.get(name))
    return None


def _both(what: str, before: object, now: object) -> str:
    values = ["none" if value is None else value for value in (before, now)]
    return f"{what} ({values[0]} before, {values[1]} now)"


def _file_difference(before: list, now: list) -> str:
    old, new = dict(map(tuple, before)), dict(map(tuple, now))
    for path, size in new.items():
        if path not in old:
            return f"one more file, {path} ({len(old)} before, {len(new)} now)"
        if old[path] != size:
            return f"another size of {path} ({old[path]} bytes before, {size} now)"
    for path in old:
        if path not in new:
            return f"one file less, {path} ({len(old)} before, {len(new)} now)"
    return "the same files in another order"
