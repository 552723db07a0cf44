"""Hooks of the monitor: attention calls of the layers of `cumulant.nn` and of transformers' models, in any mixture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from cumulant.nn.calls import AttentionCall, on_attention
from cumulant.observatory.hooks.attention import observe_attention
from cumulant.observatory.hooks.nn_adapter import REPORTING_LAYERS

EXPANSION_TOKENS = 1024  # of a block's states, from which its expansion is taken
OnCall = Callable[[str, AttentionCall], None]  # the path of the layer, and its call
OnExpansion = Callable[[str, float], None]  # the path of the block, and |output| / |input|


@contextmanager
def observe_pass(
    model: nn.Module,
    on_call: OnCall,
    on_expansion: OnExpansion,
    blocks: dict[str, nn.Module],
    running: tuple | None = None,
) -> Iterator[None]:
    """Hand every attention call inside ``model`` to ``on_call``, and the expansion of its blocks to ``on_expansion``.

    blocks   paths and modules whose states are looked at
    running  (module, args, kwargs) of a call of the model or a part of it that has already begun
    """
    names = {module: name for name, module in model.named_modules()}

    def observe(call: AttentionCall) -> None:
        name = names.get(call.module)
        if name is not None:
            on_call(name, call)

    def observe_foreign(call: AttentionCall) -> None:
        if not isinstance(call.module, REPORTING_LAYERS):  # those report to `observe` already
            observe(call)

    with ExitStack() as stack:
        stack.enter_context(on_attention(observe))
        for foreign in transformers_models(model):
            hooks = stack.enter_context(observe_attention(foreign, observe_foreign))
            if running is not None:  # hooks that are put on during a call come too late for it
                hooks.masks.begin(*running)
        for path, module in blocks.items():
            stack.callback(module.register_forward_hook(_expansion_hook(path, on_expansion), with_kwargs=True).remove)
        yield


def transformers_models(model: nn.Module) -> list[nn.Module]:
    """The outermost models of the library transformers inside a model, itself included."""
    library = sys.modules.get("transformers")  # without it there is none
    kind = getattr(library, "PreTrainedModel", None)
    if kind is None:
        return []
    found = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    return [m for name, m in found.items() if not any(_inside(name, other) for other in found if other != name)]


def entrances(model: nn.Module) -> list[nn.Module]:
    """The modules whose calls begin a pass: the model, and for those who call its parts instead, its parts."""
    found, pending = [model], list(model.children())
    while pending:
        module = pending.pop(0)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):  # these are never called themselves
            pending += module.children()
        else:
            found.append(module)
    return found


def elements(model: nn.Module) -> dict[str, nn.Module]:
    """Paths and modules of everything that stands in a list or a sequence of modules."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return {f"{name}.{k}" if name else k: child for name, m in lists for k, child in m.named_children()}


def block_of(model: nn.Module, path: str) -> str | None:
    """Path of the block that holds the layer at ``path``: the nearest element of an nn.ModuleList, or of the outermost
    nn.Sequential if there is none; the layer itself may be one. None if it stands in neither.

    >>> from torch import nn
    >>> block_of(nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"attention": nn.Identity()})])}),
    ...          "blocks.0.attention")
    'blocks.0'
    """
    parts = path.split(".") if path else []
    paths = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    parents = {p: model.get_submodule(p.rpartition(".")[0]) for p in paths}
    listed = [p for p in paths if isinstance(parents[p], nn.ModuleList)]
    in_sequence = [p for p in paths if isinstance(parents[p], nn.Sequential)]
    return listed[0] if listed else in_sequence[-1] if in_sequence else None


def _inside(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")


def _expansion_hook(path: str, on_expansion: OnExpansion):
    def hook(module: nn.Module, args: tuple, *rest) -> None:
        kwargs, output = rest if len(rest) == 2 else ({}, *rest)  # torch drops the former of hooks being removed
        before = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
        after = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape and before.ndim:
            on_expansion(path, expansion(before.detach(), after.detach()))

    return hook


@torch.no_grad()
def expansion(before: Tensor, after: Tensor) -> float:
    """|after| / |before| over some tokens of a block's states (*, D); NaN if there are none or all of them are 0.

    >>> import torch
    >>> expansion(torch.ones(2, 5, 3), torch.full((2, 5, 3), 2.0))
    2.0
    """
    rows = before.numel() // max(1, before.shape[-1])
    if rows == 0:
        return float("nan")
    stride = -(-rows // EXPANSION_TOKENS)
    sizes = [
        torch.linalg.vector_norm(x.reshape(rows, -1)[::stride].to(torch.float32)).double() for x in (after, before)
    ]
    return float((sizes[0] / sizes[1]).cpu()) if float(sizes[1]) > 0 else float("nan")
