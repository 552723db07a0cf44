"""Texts to audit a cache on: those of the user, or four kinds that a Python installation has."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence

RUN = 8  # words: texts that share runs of so many are copies of one another
LIKE = 0.2  # share of common runs above which a text is left out
CHARACTERS = 6  # of a token, more than most have: texts are cut before they are split into tokens
SPARE = 2  # documents of each kind that may turn out to have too few tokens


class AuditText(NamedTuple):
    """A text of its own: windows of one document are not independent, documents are taken to be.

    name  as it stands in tables
    kind  "prose", "code", …; of texts of the user, "text"
    text  all of it
    """

    name: str
    kind: str
    text: str


class TextWindow(NamedTuple):
    """The beginning of a document in tokens: a prefix, a continuation and the token after it.

    document   its number
    input_ids  (T + n + 1,)
    filler     tokens of the document from its beginning, for the retrieval stress
    """

    document: int
    name: str
    kind: str
    input_ids: Tensor
    filler: Tensor


def windows(
    documents: Sequence[AuditText], tokenizer: Any, prefix: int, continuation: int, number: int
) -> list[TextWindow]:
    """A window of each of ``number`` documents, kinds in turn; those that are too short are passed over.

    Documents of a kind come in an order that depends on their names alone.
    """
    needed, out = prefix + continuation + 1, []
    for document in _in_turn(documents):
        ids = tokenizer(document.text[: CHARACTERS * 2 * needed], add_special_tokens=False)["input_ids"]
        if len(ids) < needed:
            continue
        tokens = torch.tensor(ids)
        out.append(TextWindow(len(out), document.name, document.kind, tokens[:needed], tokens))
        if len(out) == number:
            return out
    if not out:
        longest = max((len(document.text) for document in documents), default=0)
        got = f"{len(documents)} texts of at most {longest} characters"
        advice = "Give longer texts, or a shorter prefix or continuation."
        raise ValueError(sentence("audit.texts", f"a text of at least {needed} tokens", got, advice))
    return out


def default_documents(characters: int, number: int) -> list[AuditText]:
    """Descriptions of installed packages, modules of Python's library, its help pages, and licences.

    characters  of a document, at least: short pages of one kind are joined
    number      of documents of all kinds together, and a few more for those that are short in tokens
    """
    each = -(-number // len(KINDS)) + SPARE
    return [
        AuditText(name, kind, text)
        for kind, texts_of in KINDS.items()
        for name, text in islice(_long(_unlike(texts_of(), characters), characters), each)
    ]


Texts = Iterator[tuple[str, str]]


def _prose() -> Texts:
    for package in _packages():
        yield f"prose/{package.name}", str(package.metadata.json.get("description", ""))


def _code() -> Texts:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: _digest(path.name)):
        yield f"code/{path.name}", path.read_text(encoding="utf-8", errors="replace")


def _help() -> Texts:
    from pydoc_data.topics import topics

    for name in sorted(topics, key=_digest):
        yield f"help/{name}", topics[name]


def _licences() -> Texts:
    own = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if own.is_file():
        yield "licence/python", own.read_text("utf-8", errors="replace")
    for package in _packages():
        root = Path(str(package.locate_file("")))
        stem = package.name.replace("-", "_")
        for path in sorted(root.glob(f"{stem}-*.dist-info/**/*")):
            if path.is_file() and re.match(r"(LICEN[CS]E|COPYING|NOTICE)", path.name):
                yield f"licence/{package.name}/{path.name}", path.read_text("utf-8", errors="replace")


KINDS: dict[str, Callable[[], Texts]] = {"prose": _prose, "code": _code, "help": _help, "licences": _licences}


def _packages() -> list[importlib.metadata.Distribution]:
    return sorted(importlib.metadata.distributions(), key=lambda package: _digest(package.name))


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _unlike(texts: Texts, characters: int) -> Texts:
    """The beginnings of texts, without copies of one that came before."""
    seen: set[int] = set()
    for name, whole in texts:
        text = whole[: 2 * characters].strip()
        words = text.split()
        runs = {hash(tuple(words[i : i + RUN])) for i in range(max(len(words) - RUN + 1, 0))}
        if len(runs) < RUN or len(runs & seen) > LIKE * len(runs):
            continue
        seen |= runs
        yield name, text


def _long(texts: Texts, characters: int) -> Texts:
    """Texts joined until each is long enough."""
    names, parts = [], []
    for name, text in texts:
        names.append(name)
        parts.append(text)
        if sum(map(len, parts)) >= characters:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield names[0] + more, "\n\n".join(parts)
            names, parts = [], []


def _in_turn(documents: Sequence[AuditText]) -> Iterator[AuditText]:
    """One of each kind after the other."""
    kinds = dict.fromkeys(document.kind for document in documents)
    queues = [iter([d for d in documents if d.kind == kind]) for kind in kinds]
    while queues:
        for queue in list(queues):
            document = next(queue, None)
            if document is None:
                queues.remove(queue)
            else:
                yield document
