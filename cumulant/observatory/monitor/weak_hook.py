"""Hooks that neither keep their owner alive nor follow a model into its copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class WeakHook:
    """Calls a method of its owner while that lives. In a copied or unpickled model it does nothing, nor in a graph that
    is being compiled, where the step would be a constant and every step a new graph."""

    def __init__(self, owner: object, method: str):
        self.owner, self.method = weakref.ref(owner), method

    def __call__(self, *call: object) -> None:
        if torch.compiler.is_compiling():
            return
        owner = self.owner()
        if owner is not None:
            getattr(owner, self.method)(*call)

    def __reduce__(self):
        return _return_nothing, ()


def _nothing(*args: object) -> None:
    """What the hooks of a copied or unpickled model do."""


def _return_nothing() -> Callable:
    return _nothing
