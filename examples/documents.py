"""Passages to read, of four kinds, from what every machine with this environment has.

Help pages of Python, modules of its library, licences and descriptions of installed packages. Many of these are copies
of each other (half of all licences are the same three), and copies are no independent documents: a passage that shares
more than a fifth of its runs of eight words with one that is taken already is left out.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sysconfig
import wave
from collections.abc import Iterable, Iterator
from pathlib import Path

from cumulant.observatory.text.corpus import Text, plan

LEAST, MOST = 1200, 2000  # characters of a passage
RUN = 8  # words
ATTEMPTS = 4  # at a passage of a text that is unlike all others
LONGEST = 29  # seconds of a recording: Whisper hears 30 at once
NOT_SPOKEN = re.compile(r"<[^>]*>|https?://\S+|[^A-Za-z0-9,.'?! -]")


def help_pages() -> dict[str, str]:
    """Topics of Python's own help."""
    from pydoc_data.topics import topics

    return {f"help/{name}": body for name, body in topics.items()}


def code() -> dict[str, str]:
    """Modules of Python's library."""
    paths = Path(sysconfig.get_path("stdlib")).glob("*.py")
    return {f"code/{path.name}": path.read_text(encoding="utf-8", errors="replace") for path in paths}


def licences() -> dict[str, str]:
    """Licences of installed packages and of what they include."""
    files = [(p.name, file) for p in importlib.metadata.distributions() for file in p.files or ()]
    named = [(name, f) for name, f in files if re.match(r"(LICEN[CS]E|COPYING)", f.name) and ".dist-info" in str(f)]
    paths = {f"licence/{name}/{file}": Path(str(file.locate())) for name, file in named}
    return {name: path.read_text(encoding="utf-8", errors="replace") for name, path in paths.items() if path.is_file()}


def prose() -> dict[str, str]:
    """Descriptions of installed packages."""
    packages = {package.name: package.metadata.json for package in importlib.metadata.distributions()}
    return {f"prose/{name}": str(about.get("description", "")) for name, about in packages.items()}


KINDS = {"prose": prose, "code": code, "help": help_pages, "licences": licences}


def passages(bodies: dict[str, str]) -> dict[str, str]:
    """A passage of each text that is long enough, from a line chosen by its name, none like one before it.

    >>> words = "of all the words that are here no two runs are alike "
    >>> len(passages({"a": 40 * words, "b": 50 * words, "short": words}))
    1
    """
    found, seen = {}, []
    for name in sorted(bodies, key=_digest):
        body = bodies[name]
        lines = [0, *(match.end() for match in re.finditer("\n", body))]
        starts = [first for first in lines if len(body) - first >= LEAST]
        for attempt in range(ATTEMPTS if starts else 0):
            first = starts[_digest(f"{name} {attempt}") % len(starts)]
            runs = _runs(body[first : first + MOST])
            if all(len(runs & other) <= 0.2 * min(len(runs), len(other)) for other in seen):
                found[name] = body[first : first + MOST]
                seen.append(runs)
                break
    return found


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}


def all_passages() -> dict[str, dict[str, str]]:
    """kind → name → passage."""
    return {kind: passages(bodies()) for kind, bodies in KINDS.items()}


def draw(kind: str, count: int, seed: int, known: dict[str, dict[str, str]] | None = None) -> list[Text]:
    """Documents of a kind: draws of the same size have none in common while there are enough.

    known  what `all_passages` gave; None: asked again
    """
    bodies = passages(KINDS[kind]()) if known is None else known[kind]
    names = [list(bodies)[(count * seed + i) % len(bodies)] for i in range(count)]
    return [Text(100 * list(KINDS).index(kind) + i, name, bodies[name]) for i, name in enumerate(names)]


def spoken(texts: Iterable[Text], directory: Path) -> Iterator[Text]:
    """Recordings of the words with which passages begin, at most LONGEST seconds, spoken by espeak-ng; with the words.

    A model that writes its own transcript goes round in circles on some of these, or stops after a word.
    """
    for number, text in enumerate(texts):
        words = " ".join(NOT_SPOKEN.sub(" ", text.body).split())[:380].rpartition(" ")[0]
        path = directory / f"{number:02d}.wav"
        while (seconds := _say(words, path)) > LONGEST:
            words = words[: int(len(words) * LONGEST / seconds)].rpartition(" ")[0]
        (one,) = plan(audio=path, transcripts=[words]).texts()
        yield one._replace(index=text.index, name=text.name)


def _say(words: str, path: Path) -> float:
    """Write a recording; its seconds."""
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(path), "--", words], check=True)
    with wave.open(str(path)) as sound:
        return sound.getnframes() / sound.getframerate()
