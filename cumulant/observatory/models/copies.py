"""Converted models on disk: what takes many seconds to read in its own format is cached as safetensors.

Copies lie under $CUMULANT_CACHE, or ~/.cache/cumulant, keyed by the sha256 of what they were made of. A copy appears in
one step; one whose files do not have the sizes that contents.json lists is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cumulant.files import new_directory

CONTENTS = "contents.json"  # names and sizes of the files of a copy, written last
FORMAT = 2  # of the copies; 2: the tokenizer adds what its GGUF file says, and weights in parts are joined


def cache_directory() -> Path:
    """The directory of converted models."""
    return Path(os.environ.get("CUMULANT_CACHE") or "~/.cache/cumulant").expanduser()


def copy_of(files: Sequence[Path]) -> Path:
    """Where the copy of a model in these files lies, whether it is there or not."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                total.update(block)
    return cache_directory() / "models" / f"{files[0].name.split('.gguf')[0]}-{total.hexdigest()[:16]}-{FORMAT}"


def through_copy(
    files: Sequence[Path], convert: Callable[[], Sequence[Any]], read: Callable[[Path], Sequence[Any]]
) -> tuple[Sequence[Any], tuple[str, ...]]:
    """What ``read`` finds in the copy of some files, made by ``convert`` if there is none, and notes.

    convert  gives parts that have save_pretrained (the model, its tokenizer), or None
    read     gives the same parts from a directory
    """
    from safetensors import SafetensorError

    copy = copy_of(files)
    if not is_complete(copy):
        parts = convert()
        try:
            _keep(copy, parts)
        except (OSError, SafetensorError) as error:  # a full disk costs time on the next load, nothing else
            reason = getattr(error, "strerror", None) or str(error)
            return parts, (f"the converted model could not be kept in {copy.parent} ({reason})",)
    return read(copy), ()


def is_complete(copy: Path) -> bool:
    """Whether a directory has the files that its contents name, in full."""
    try:
        sizes = json.loads((copy / CONTENTS).read_bytes())
        return bool(sizes) and all((copy / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _keep(copy: Path, parts: Sequence[Any]) -> None:
    shutil.rmtree(copy, ignore_errors=True)  # incomplete
    try:
        with new_directory(copy) as draft:
            for part in parts:
                if part is not None:
                    part.save_pretrained(draft)
            sizes = {path.name: path.stat().st_size for path in draft.iterdir()}
            (draft / CONTENTS).write_text(json.dumps(sizes, indent=1, sort_keys=True))
    except OSError:
        if not is_complete(copy):  # another process may have been faster
            raise
