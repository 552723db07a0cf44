"""Every architecture of transformers at a size of a few thousand weights: does a clip scale one head and no other?

For every attention layer that can be clipped and every head of it, in the first call of the layer in a pass,

    logits of the clipped head = γ · logits before,      logits of all others as before,

from the queries and keys that attention is called with; and the recorded maxima are those of the logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.observatory.hooks.attention import observe_attention
from cumulant.observatory.hooks.structure import NotFound
from cumulant.observatory.monitor import Monitor, QKClip
from tests.observatory import architectures, tiny_models

RATES = ("dropout", "drop", "pdrop")  # in names of configurations and modules


class ClipOutcome(NamedTuple):
    """What became of one model.

    clipped  paths of layers whose heads were clipped, one at a time
    reasons  why others cannot be, or the whole model
    faults   what is wrong, empty where nothing is
    """

    clipped: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class Logits(NamedTuple):
    """scale · ⟨q, k⟩ of the first call of a layer (batch, heads, q, n), and the largest visible of all its calls."""

    first: Tensor
    largest: Tensor
    calls: int


def without_dropout(model: Any) -> Any:
    """The model with every rate of dropout at 0, in its configurations and its modules."""
    configs = [c for c in (model.config, *(getattr(m, "config", None) for m in model.modules())) if c is not None]
    for holder in (*configs, *_parts(model.config), *model.modules()):
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and any(rate in name for rate in RATES):
                setattr(holder, name, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _parts(config: Any) -> Iterator[Any]:
    for name in getattr(type(config), "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield part
            yield from _parts(part)


def logits(model: nn.Module, batch: dict) -> dict[str, Logits]:
    """By brute force from the queries and keys of the model's own attention; wrong where scores are capped."""
    found: dict[str, Logits] = {}

    with_gradients: dict[nn.Module, bool] = {}

    def note(module, args) -> None:
        with_gradients[module] = torch.is_grad_enabled()

    def observe(call) -> None:
        key = call.key.repeat_interleave(call.eta.shape[1] // call.key.shape[1], 1)
        score = call.eta.double() @ key.double().mT
        support = call.support
        visible = None if support.unrestricted else support.weigh(torch.zeros_like(score)) > -torch.inf
        if not with_gradients[call.module]:  # a model that iterates without them
            visible = torch.zeros_like(score, dtype=torch.bool)
        top = (score if visible is None else score.masked_fill(~visible, -torch.inf)).amax((0, 2, 3))
        before = found.get(call.name)
        found[call.name] = (
            Logits(score, top, 1)
            if before is None
            else Logits(before.first, torch.maximum(before.largest, top), before.calls + 1)
        )

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(note).remove)
        stack.enter_context(observe_attention(model, observe))
        read(model, batch)
    return found


def read(model: nn.Module, batch: dict) -> None:
    """One call, with the same random choices every time."""
    torch.manual_seed(1)
    model(**batch)


def clip_each_head(model: nn.Module, batch: dict, *, capped: bool = False, factor: float = 0.5) -> ClipOutcome:
    """Clip every head of every layer by ``factor``, one at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            monitor = Monitor(model, every=10**6, clip=QKClip(1e9))
        except ValueError as error:
            return ClipOutcome(reasons=(str(error),))
    with monitor:
        try:
            read(model, batch)
        except ValueError as error:
            return ClipOutcome(reasons=(str(error),))
        return _clip_each_head(monitor, model, batch, capped, factor)


def _clip_each_head(monitor: Monitor, model: nn.Module, batch: dict, capped: bool, factor: float) -> ClipOutcome:
    clipper, faults = monitor.clipper, []
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert clipper is not None
    recorded = {layer.name: layer.largest.double().clone() for layer in clipper.layers}
    before = {} if capped else logits(model, batch)
    for number, layer in enumerate(clipper.layers):
        seen = before.get(layer.name)
        if seen is None:
            if bool(torch.isfinite(recorded[layer.name]).any()) and not capped:
                faults.append(f"{layer.name}: recorded, and seen by nobody else")
            continue
        if not torch.allclose(recorded[layer.name], seen.largest, rtol=1e-4, atol=1e-5):
            faults.append(f"{layer.name}: recorded {recorded[layer.name]}, found {seen.largest}")
        for head in range(0 if isinstance(layer.parts, NotFound) else len(layer.largest)):
            largest = torch.full_like(layer.largest, -torch.inf)
            largest[head] = 1e9 / factor
            with torch.no_grad():
                clipper._clip(1, number, largest, None)  # pyright: ignore[reportPrivateUsage]
            faults += _changes(layer.name, head, factor, seen.first, logits(model, batch)[layer.name].first)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(weights[name])
    clipped = tuple(x.name for x in clipper.layers if not isinstance(x.parts, NotFound) and x.name in before)
    reasons = tuple(f"{x.name}: {x.parts.reason}" for x in clipper.layers if isinstance(x.parts, NotFound))
    return ClipOutcome(clipped, reasons, tuple(faults))


def _changes(name: str, head: int, factor: float, before: Tensor, after: Tensor) -> list[str]:
    """What a clip of one head changed that it should not have, or did not change."""
    size = before.abs().amax((0, 2, 3))
    wanted = before.clone()
    wanted[:, head] *= factor
    error = (after - wanted).abs().amax((0, 2, 3)) / size.clamp_min(1e-9)
    faults = []
    if float(error[head]) > 1e-5:
        faults.append(f"{name} head {head}: not scaled by {factor}, off by {float(error[head]):.2g} of its logits")
    others = error.clone()
    others[head] = 0
    if float(others.max()) > 1e-6:
        faults.append(f"{name} head {head}: head {int(others.argmax())} changed by {float(others.max()):.2g}")
    return faults


def clip_architecture(kind: str, **changed: object) -> ClipOutcome:
    """The outcome for an architecture of transformers with some of its configuration changed; `NotTried` where it
    cannot be built or run."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            config = architectures.shrunk_config(kind)
            for name, value in changed.items():
                setattr(config, name, value)
            with torch.device("meta"):
                size = sum(4 * p.numel() for p in tiny_models.hf.AutoModel.from_config(config).parameters())
            if size > architectures.MAX_BYTES:
                raise architectures.NotTried("it is too large")
            model = tiny_models.randomise(tiny_models.hf.AutoModel.from_config(config).float().eval(), 0)
            batch = architectures.inputs_of(without_dropout(model))
            with torch.no_grad():
                model(**batch)
        except Exception as error:
            raise architectures.NotTried(str(error)) from error
        return clip_each_head(model.requires_grad_(True), batch, capped=_is_capped(model))


def _is_capped(model: Any) -> bool:
    return any(getattr(c, "attn_logit_softcapping", None) is not None for c in (model.config, *_parts(model.config)))
