"""Hooks of the monitor: attention calls of the layers of `cumulant.nn` and of transformers' models, in any mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.nn.calls import AttentionCall, on_attention
from cumulant.observatory.hooks.attention import observe_attention
from cumulant.observatory.hooks.structure import (
    REPORTING_LAYERS,
    attention_modules,
    first_paths,
    reporting_layers,
    transformers_models,
)

EXPANSION_TOKENS = 1024  # of a block's states, from which its expansion is taken
OnCall = Callable[[str, AttentionCall], None]  # the path of the layer, and its call
OnExpansion = Callable[[str, Tensor], None]  # the path of the block, and |output| / |input|


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
    running  (module, args, kwargs) of a call of the model or a part of it that has already begun; the expansion of that
             module is not looked at: torch goes through its hooks while they would be taken off
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
        for foreign in transformers_models(model).values():
            stack.enter_context(observe_attention(foreign, observe_foreign, running=running))
        for path, module in blocks.items():
            if running is None or module is not running[0]:
                hook = expansion_hook(path, on_expansion)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def require_observable(model: nn.Module) -> None:
    """Refuse a model whose only attention is torch's own, which reports no call; one layer that can be seen is enough.

    >>> require_observable(nn.TransformerEncoderLayer(4, 2))
    Traceback (most recent call last):
    ValueError: Monitor.model: expected attention that can be observed, of cumulant.nn or of transformers, got
    torch.nn.MultiheadAttention at self_attn. Replace each, with its weights: cumulant.nn.swap(model, path,
    MultiheadAttention.of(model.get_submodule(path))).
    """
    paths = attention_modules(model)
    opaque = [path for path in paths if type(model.get_submodule(path)) is nn.MultiheadAttention]
    if opaque and opaque == paths and not transformers_models(model):
        expected = "attention that can be observed, of cumulant.nn or of transformers"
        got = f"torch.nn.MultiheadAttention at {first_paths(opaque)}"
        advice = (
            "Replace each, with its weights: cumulant.nn.swap(model, path, "
            "MultiheadAttention.of(model.get_submodule(path)))."
        )
        raise ValueError(sentence("Monitor.model", expected, got, advice))


def advice_without_calls(model: nn.Module) -> str:
    """What to do where a step had no attention call; names attention that may be of a kind that reports none."""
    advice = "Run the model with gradients on, or inside `with monitor.watching():`."
    paths = attention_modules(model)
    if not paths or reporting_layers(model) or transformers_models(model):
        return advice
    return f"{advice} Attention of your own, here {first_paths(paths)}, has to call cumulant.nn.report_attention."


def entrances(model: nn.Module) -> list[nn.Module]:
    """The modules whose calls begin a pass: the model, and for those who call its parts instead, its parts."""
    modules, pending = [model], list(model.children())
    while pending:
        module = pending.pop(0)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):  # these are never called themselves
            pending += module.children()
        else:
            modules.append(module)
    return modules


def expansion_hook(path: str, on_expansion: OnExpansion) -> Callable:
    """A forward hook of the block at ``path``."""

    def hook(module: nn.Module, args: tuple, *rest) -> None:
        kwargs, output = rest if len(rest) == 2 else ({}, *rest)  # torch drops the former of hooks being removed
        before = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
        after = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape and before.ndim:
            on_expansion(path, expansion(before.detach(), after.detach()))

    return hook


@torch.no_grad()
def expansion(before: Tensor, after: Tensor) -> Tensor:
    """|after| / |before| over some tokens of a block's states (*, D); NaN if there are none or all of them are 0.

    It stays on the device: a pass that is observed waits for nothing.

    >>> import torch
    >>> expansion(torch.ones(2, 5, 3), torch.full((2, 5, 3), 2.0))
    tensor(2., dtype=torch.float64)
    """
    rows = before.numel() // max(1, before.shape[-1])
    if rows == 0:
        return torch.full((), torch.nan, dtype=torch.float64, device=after.device)
    stride = -(-rows // EXPANSION_TOKENS)
    sizes = [
        torch.linalg.vector_norm(x.reshape(rows, -1)[::stride].to(torch.float32)).double() for x in (after, before)
    ]
    return torch.where(sizes[1] > 0, sizes[0] / sizes[1], torch.nan)
