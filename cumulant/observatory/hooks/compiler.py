"""Observed passes run as written, whatever of the model is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_open: list[object] = []  # one per pass being observed
_stance = ExitStack()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Everything that was compiled runs as written inside.

    torch has one stance per process and gives back the one it found: of two that overlap, the one that ends last would
    leave the compiler off for good. So the first to begin sets the stance and the last to end gives it back.
    """
    this = object()
    if not _open:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    _open.append(this)
    try:
        yield
    finally:
        _open.remove(this)
        if not _open:
            _stance.close()
