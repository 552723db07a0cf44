"""The record of an audit: settings and windows, in a directory that can be gone on with."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cumulant.cache.audit.result import Method, MethodResult, WindowResult
from cumulant.checks import sentence
from cumulant.files import write

if TYPE_CHECKING:
    from cumulant.cache.audit.summary import DamagedHead, MethodRow

FORMAT = "cumulant cache audit 1"
SETTINGS, WINDOWS = "audit.json", "windows"
NAMED = re.compile(r"window-\d{4}\.safetensors")


@dataclass(frozen=True)
class AuditSettings:
    """What makes two audits the same: with all of these equal (=), one goes on where the other stopped.

    model         its name, fingerprint a hash of its weights
    methods       names; keeps their budgets
    prefix        tokens that are compressed, continuation those that are read after them
    every         one token in so many has its queries measured
    retrieval     whether questions are asked
    versions      of the packages that numbers depend on; others may go on
    notes         what is said beside the numbers
    """

    model: str
    fingerprint: str
    methods: tuple[str, ...]
    keeps: tuple[float, ...]
    prefix: int
    continuation: int
    every: int
    retrieval: bool
    versions: dict[str, str]
    notes: tuple[str, ...] = ()

    def difference(self, other: AuditSettings) -> str | None:
        """The first setting in which two audits differ, in words; None: they are the same."""
        for name, mine in asdict(self).items():
            theirs = asdict(other)[name]
            if name not in ("versions", "notes") and mine != theirs:
                return f"{name} {theirs!r} in place of {mine!r}"
        return None


@dataclass(frozen=True, eq=False)
class AuditRecord:
    """How wrong a cache is, |ΔG|, |ô − o|, KL(p ‖ p̂), for every method at every budget, on windows of documents.

    settings  of the audit
    windows   one for each document
    """

    settings: AuditSettings
    windows: tuple[WindowResult, ...]

    @property
    def methods(self) -> list[Method]:
        """Methods and budgets, in the order they were asked for."""
        return [Method(name, keep) for name in self.settings.methods for keep in self.settings.keeps]

    def results(self, method: Method) -> list[MethodResult]:
        """Of one method at one budget, window by window."""
        return [window.methods[method] for window in self.windows]

    def rows(self) -> list[MethodRow]:
        """The table: a row for every method at every budget, with intervals over documents."""
        from cumulant.cache.audit.summary import method_rows

        return method_rows(self)

    def heads(self, method: Method) -> list[DamagedHead]:
        """All heads with one method at one budget, the most damaged first."""
        from cumulant.cache.audit.summary import damaged_heads

        return damaged_heads(self, method)

    def report(self, directory: str | Path) -> Path:
        """Write methods.parquet, heads.parquet and report.html; the path of the page."""
        from cumulant.cache.audit.directory import PAGE, write_report

        write_report(self, directory)
        return Path(directory) / PAGE

    def __str__(self) -> str:
        """What was found, in one or two sentences."""
        from cumulant.cache.audit.summary import sentence_of

        return sentence_of(self)

    def save(self, directory: str | Path) -> None:
        """Write settings and windows."""
        directory = Path(directory)
        (directory / WINDOWS).mkdir(parents=True, exist_ok=True)
        save_settings(self.settings, directory)
        for window in self.windows:
            window.save(window_path(directory, window.document))

    @classmethod
    def load(cls, directory: str | Path) -> AuditRecord:
        """What `save`, `audit` or `cumulant audit` wrote; windows that were finished, if it was stopped.

        >>> AuditRecord.load("nowhere")
        Traceback (most recent call last):
        ValueError: nowhere: expected an audit, got no audit.json. Give the directory that `cumulant audit` wrote.
        """
        directory = Path(directory)
        settings = load_settings(directory)
        if settings is None:
            advice = "Give the directory that `cumulant audit` wrote."
            raise ValueError(sentence(str(directory), "an audit", f"no {SETTINGS}", advice))
        paths = sorted((directory / WINDOWS).glob("window-*.safetensors"))
        windows = tuple(WindowResult.load(path) for path in paths if NAMED.fullmatch(path.name))
        if not windows:
            advice = "Run the audit again."
            raise ValueError(sentence(str(directory), "at least one window", "none", advice))
        return cls(settings, windows)


def window_path(directory: Path, document: int) -> Path:
    """The file of the window of a document."""
    return directory / WINDOWS / f"window-{document:04d}.safetensors"


def save_settings(settings: AuditSettings, directory: Path) -> None:
    """Write `audit.json`, in one step."""
    write(directory / SETTINGS, json.dumps({"format": FORMAT} | asdict(settings), indent=1, ensure_ascii=False))


def load_settings(directory: Path) -> AuditSettings | None:
    """The settings of an audit in a directory; None: there is none."""
    path = directory / SETTINGS
    if not path.is_file():
        return None
    try:
        read = json.loads(path.read_text("utf-8"))
        if read.pop("format", None) != FORMAT:
            raise KeyError("format")
        for name in ("methods", "keeps", "notes"):
            read[name] = tuple(read[name])
        return AuditSettings(**read)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        advice = "Give an empty directory, or one that `cumulant audit` wrote with this version."
        raise ValueError(sentence(str(path), FORMAT, "something else", advice)) from None
