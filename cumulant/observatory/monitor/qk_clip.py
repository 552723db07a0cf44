"""QK-clip: logits of attention that grow beyond a bound are scaled back to it, head by head, after every step.

    γ_h = min(1, τ / m_h),      m_h = max over visible pairs since the last step of scale · ⟨q_hi, k_hj⟩

The rows of queries and keys of head h are multiplied by γ_h^½ each (`head_rows` has the other cases): its logits fall
to τ for the tokens that set the maximum, and no other head changes. Source: Kimi K2, arXiv 2507.20534, section 2.1.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from math import isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from cumulant.checks import sentence
from cumulant.nn.largest_logit import start_recording, stop_recording
from cumulant.observatory.hooks.structure import NotFound, attention_modules
from cumulant.observatory.hooks.weights import head_count
from cumulant.observatory.monitor.actions import Action
from cumulant.observatory.monitor.projections import HeadRows, head_rows, parameter_of

MOMENTA = ("exp_avg", "momentum_buffer")  # names of first moments in the state of torch's optimizers


class ClipWarning(UserWarning):
    """Layers whose logits are measured and cannot be clipped."""


@dataclass(frozen=True)
class QKClip:
    """Keep the logits of every head at or below ``threshold``.

        γ_h = min(1, τ / m_h),      m_h = max over visible pairs of scale · ⟨q_hi, k_hj⟩

    threshold  τ, in the units of the scores that softmax sees
    momentum   "keep" leaves the state of the optimizer; "scale" multiplies first moments of the scaled rows by the same
               factor, so that what has driven the logits up drives less; second moments are left in both

    >>> QKClip(threshold=50.0)
    QKClip(threshold=50.0, momentum='keep')
    """

    threshold: float = 100.0
    momentum: Literal["keep", "scale"] = "keep"

    def __post_init__(self) -> None:
        bound = self.threshold
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not (bound > 0 and isfinite(bound)):
            advice = "100 is usual; without a clip logits are not bounded."
            raise ValueError(sentence("QKClip.threshold", "a positive number", bound, advice))
        if self.momentum not in ("keep", "scale"):
            got = repr(self.momentum)
            raise ValueError(sentence("QKClip.momentum", "'keep' or 'scale'", got, "See help(QKClip)."))


class ClippedLayer(NamedTuple):
    """An attention layer, the maxima (heads,) it records, and what to scale; or why nothing can be."""

    name: str
    module: nn.Module
    largest: Tensor
    parts: list[HeadRows] | NotFound


class LogitClipper:
    """The largest logits of a model's heads, and their rescaling, from its creation to `close`.

    Models of transformers are on ``attn_implementation="cumulant"`` (`SwitchedAttention`): its kernel gives the maxima
    with the output. Layers that cannot be clipped are measured and named in a `ClipWarning`.
    """

    def __init__(self, model: nn.Module, settings: QKClip):
        self.settings = settings
        self.layers = _clipped_layers(model)
        self._silent = False
        self._finalizer = weakref.finalize(self, _stop_all, [layer.module for layer in self.layers])

    def close(self) -> None:
        """Let go of the model: nothing is recorded."""
        self._finalizer()

    @torch.no_grad()
    def act(self, step: int, optimizer: Optimizer | None = None) -> list[Action]:
        """Scale the heads whose logits exceeded the threshold since the last call, on all ranks alike."""
        if self.settings.momentum == "scale" and optimizer is None:
            advice = "Call monitor.step(optimizer=optimizer)."
            raise ValueError(sentence("Monitor.step.optimizer", "the optimizer, to scale its momentum", None, advice))
        maxima = torch.cat([layer.largest.to(self.layers[0].largest.device) for layer in self.layers])
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            distributed.all_reduce(maxima, distributed.ReduceOp.MAX)
        for layer in self.layers:
            layer.largest.fill_(-torch.inf)
        seen = maxima.cpu()  # the one look of a step: every look waits for the device
        if bool((seen <= self.settings.threshold).all()):
            self._warn_if_silent(seen)
            return []
        parts = maxima.split([len(layer.largest) for layer in self.layers])
        return [a for number, part in enumerate(parts) for a in self._clip(step, number, part, optimizer)]

    def _warn_if_silent(self, maxima: Tensor) -> None:
        if not self._silent and bool((maxima == -torch.inf).all()):
            self._silent = True
            advice = (
                "Run the model with gradients on before step(), with its attention through transformers' interface."
            )
            words = sentence("Monitor.clip", "logits of a training pass", "none", advice)
            warnings.warn(words, ClipWarning, stacklevel=5)  # of Monitor.step, behind torch's no_grad

    def _clip(self, step: int, number: int, largest: Tensor, optimizer: Optimizer | None) -> list[Action]:
        bound, layer = self.settings.threshold, self.layers[number]
        over = torch.isfinite(largest) & (largest > bound)
        factors = torch.where(over, bound / largest, 1.0)
        if not isinstance(layer.parts, NotFound) and bool(over.any()):
            for part in layer.parts:
                _scale(parameter_of(layer.module, part.name), part, factors, optimizer, self.settings.momentum)
        actions = []
        for head, before in enumerate(largest.tolist()):
            where = f"layer {number} head {head}"
            if before <= bound:
                continue
            if not isfinite(before):
                words = f"{where}: its logits are not finite, nothing was scaled"
                actions.append(Action("finite", step, number, layer.name, head, before, before, words))
            elif isinstance(layer.parts, NotFound):
                words = f"{where}: largest logit {before:.4g}, not clipped, as {layer.parts.reason}"
                actions.append(Action("unclipped", step, number, layer.name, head, before, before, words))
            else:
                words = f"{where}: logits scaled from {before:.4g} down to {bound:g}"
                actions.append(Action("clip", step, number, layer.name, head, before, bound, words))
        return actions


def _clipped_layers(model: nn.Module) -> list[ClippedLayer]:
    reached: list[tuple[str, nn.Module, int, list[HeadRows] | NotFound]] = []
    unreachable = []
    for name in attention_modules(model):
        module = model.get_submodule(name)
        heads, parts = head_count(module), head_rows(module)
        if not heads:
            unreachable.append(f"{name} ({parts.reason if isinstance(parts, NotFound) else 'no heads'})")
            continue
        if not isinstance(parts, NotFound):
            _refuse_tied(model, module, name, parts)
        else:
            unreachable.append(f"{name} ({parts.reason})")
        reached.append((name, module, heads, parts))
    if all(isinstance(parts, NotFound) for *_, parts in reached):
        got = "; ".join(unreachable[:3]) or "no attention layer"
        advice = (
            "Use a transformers model with separate, fused or latent projections, or cumulant.nn.MultiheadAttention."
        )
        raise ValueError(sentence("Monitor.clip", "query and key projections that can be reached", got, advice))
    if unreachable:
        more = f" and {len(unreachable) - 3} more" if len(unreachable) > 3 else ""
        words = f"QKClip: these layers are measured and not clipped: {'; '.join(unreachable[:3])}{more}"
        warnings.warn(words, ClipWarning, stacklevel=4)
    return [
        ClippedLayer(name, module, start_recording(module, heads, _device(module)), parts)
        for name, module, heads, parts in reached
    ]


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _refuse_tied(model: nn.Module, module: nn.Module, name: str, parts: list[HeadRows]) -> None:
    mine = {id(parameter_of(module, part.name)) for part in parts}
    inside = {id(p) for p in module.parameters()}
    paths: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in mine & inside:
            paths.setdefault(id(parameter), []).append(path)
    tied = next((found for found in paths.values() if len(found) > 1), None)
    if tied is not None and len({p.rpartition(".")[0] for p in tied}) > 1 and not _one_module(model, tied):
        advice = "Untie them, or leave clip out: scaling one would scale the other."
        raise ValueError(sentence("Monitor.clip", f"projections of {name} of its own", " = ".join(tied), advice))


def _one_module(model: nn.Module, paths: list[str]) -> bool:
    """Whether paths name one module under several names, as layers that are shared over depth."""
    return len({id(model.get_submodule(path.rpartition(".")[0])) for path in paths}) == 1


def _stop_all(modules: list[nn.Module]) -> None:
    for module in modules:
        stop_recording(module)


def _scale(
    parameter: nn.Parameter, part: HeadRows, factors: Tensor, optimizer: Optimizer | None, momentum: str
) -> None:
    """Multiply the rows of each head by its factor; the sum of products is taken in float32."""
    heads = len(part.rows)
    own = factors if heads == len(factors) else factors.view(heads, -1).amin(1)
    line = torch.ones(parameter.shape[part.axis], device=factors.device)
    line[part.rows.to(line.device)] = (own**part.power)[:, None].expand(part.rows.shape)
    sizes = [1] * parameter.ndim
    sizes[part.axis] = -1
    table = line.view(sizes).expand(parameter.shape)
    _multiply(parameter, table)
    if momentum == "scale" and optimizer is not None:
        for name in MOMENTA:
            state = optimizer.state.get(parameter, {}).get(name)
            if isinstance(state, Tensor) and state.shape == parameter.shape:
                _multiply(state, table)


def _multiply(tensor: Tensor, table: Tensor) -> None:
    if hasattr(tensor, "placements"):  # a DTensor of FSDP2 or tensor parallelism
        from torch.distributed.tensor import distribute_tensor

        table = distribute_tensor(table.contiguous().to(tensor.device), tensor.device_mesh, tensor.placements)  # pyright: ignore[reportAttributeAccessIssue]
    tensor.copy_(
        (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * table.to(tensor.device)).to(tensor.dtype)
    )
