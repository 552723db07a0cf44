"""`moments` on tensors as they lie: one look-up by shapes and strides, one call of the native kernel, nothing copied.

What the look-up finds is a `DirectPlan`: arguments that were checked when their shapes were first seen, and the call of
the kernel with all but the addresses filled in. What it does not serve (transforms of torch.func, graphs of the
compiler, other devices, more than four batch axes, results that are not finite) goes the way of flattened inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack  # pyright: ignore[reportMissingImports]
from torch.autograd import forward_ad

from cumulant.kernels.moments import CENTRED
from cumulant.kernels.native.arguments import GRADIENTS_IN, Call
from cumulant.kernels.native.call import DTYPES, PLAIN, enter, entries, point
from cumulant.kernels.native.geometry import Geometry, geometry

PLANS = 4096  # how many are remembered
VECTORS = ("mean", "atom_mean")
TRACES = ("value_trace", "atom_trace")


class Arguments(NamedTuple):
    """The tensors of a call: eta (*batch, q, d), atoms (*batch, n, d), values (*batch, n, e), log weights (*batch, n)
    or (*batch, q, n), a mask broadcastable to (*batch, q, n), a sink (*batch); what is absent is None."""

    eta: Tensor
    atoms: Tensor
    values: Tensor | None
    log_weights: Tensor | None
    mask: Tensor | None
    sink: Tensor | None


class MomentsSettings(NamedTuple):
    """What to compute: names of statistics, factor of eta, causal order, window and offset as in `moments`; and who
    asked, for messages."""

    wanted: frozenset[str]
    scale: float
    causal: bool
    window: int | None
    offset: int | None
    caller: str = "moments"


class Shapes(NamedTuple):
    """What a check of the arguments found: batch axes of the answer, heads of eta per head of atoms."""

    lead: tuple[int, ...]
    ratio: int
    per_pair: bool
    window: int | None
    offset: int


Flat = Callable[[Arguments, MomentsSettings], dict[str, Tensor]]  # the same by flattened inputs, differentiable twice
Check = Callable[[Arguments, MomentsSettings], Shapes]

plans: dict[tuple, DirectPlan | None] = {}


def serve(
    x: Arguments, settings: MomentsSettings, check: Check, flat: Flat, kind: type[DirectPlan] | None = None
) -> dict[str, Tensor] | None:
    """The wanted statistics by name; None where this way does not serve.

    kind  of plan: by which kernel; the native one if None
    """
    kind = kind or DirectPlan
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return None
    form = (None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in x)
    key = (kind, settings, *form)
    plan = plans.get(key)
    if plan is None and key not in plans:  # no try: an error of make_plan would be shown as a consequence of a KeyError
        if len(plans) >= PLANS:
            plans.clear()
        plan = plans[key] = make_plan(x, settings, check, kind=kind)
    if plan is None:
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        out = DirectMoments.apply(plan, flat, settings, *x)
        return dict(zip(plan.outputs, out, strict=True))
    out, _, irregular = plan.forward(x)
    return flat(x, settings) if irregular else out


# ---------------------------------------------------------------------- plans


@dataclass(frozen=True, eq=False)
class DirectPlan:
    """One way of calling the kernel.

    template   the bytes of a `Call` without addresses
    outputs    name → shape
    prepared   which arguments must be brought into a readable form first
    lead       batch axes of the answer, the heads of a group split off
    targets    shape of each argument with the axes of ``lead``, to which its gradient is summed
    """

    template: bytes
    outputs: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    prepared: tuple[int, ...]
    per_pair: bool
    geometry: Geometry
    lead: tuple[int, ...]
    targets: tuple[tuple[int, ...] | None, ...]
    shared_pairs: bool

    @classmethod
    def reads(cls, x: Arguments) -> bool:
        """Whether the kernel can read tensors of this type, device and dtype."""
        if entries() is None or any(t is not None and (type(t) not in PLAIN or not t.is_cpu or t.is_neg()) for t in x):
            return False
        return all(t.dtype in DTYPES for t in x if t is not None)

    @classmethod
    def forms(cls, names: Set[str], x: Arguments) -> bool:
        """Whether the kernel forms these statistics."""
        return True

    @property
    def groups(self) -> tuple[int, ...]:
        """Axes of ``lead`` over which the key side varies, 1 elsewhere: groups are numbered over them."""
        return tuple(1 if i in self.geometry.folded else size for i, size in enumerate(self.lead))

    def forward(
        self, x: Sequence[Tensor | None], more: Callable[[Call], object] | None = None
    ) -> tuple[dict[str, Tensor], Call, bool]:
        """Results by name, the call that gave them, and whether any of them is not finite.

        more  adds to the call, and returns what must live as long as it runs
        """
        c, alive = self._call(x)
        kept = None if more is None else more(c)
        out = {}
        for name, shape in self.outputs.items():
            out[name] = tensor = torch.empty(shape, dtype=self.dtype, device="cpu")
            setattr(c, name, tensor.data_ptr())
        irregular = enter("forward", c)
        del alive, kept
        return out, c, irregular > 0

    def _call(self, x: Sequence[Tensor | None]) -> tuple[Call, list[Tensor | None]]:
        c = Call.from_buffer_copy(self.template)
        tensors = list(x)
        for index in self.prepared:
            tensors[index] = _readable(index, tensors[index], tensors[1], self.dtype)  # pyright: ignore[reportArgumentType]
        c.eta.data = tensors[0].data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
        c.atoms.data = tensors[1].data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
        for operand, tensor in (
            (c.values, tensors[2]),
            (c.per_pair if self.per_pair else c.per_atom, tensors[3]),
            (c.mask, tensors[4]),
            (c.sink, tensors[5]),
        ):
            if tensor is not None:
                operand.data = tensor.data_ptr()
        return c, tensors

    def backward(
        self, x: Sequence[Tensor | None], out: dict[str, Tensor], grad: dict[str, Tensor], needs: Sequence[bool]
    ) -> list[Tensor | None] | None:
        """Gradients of eta, atoms, values, log weights, mask (None) and sink; None if they are not all finite."""
        if not out["log_normalizer"].numel():  # without queries there are no addresses either
            return [torch.zeros_like(t) if need and t is not None else None for t, need in zip(x, needs, strict=True)]
        c, alive = self._call(x)
        for name, tensor in out.items():
            setattr(c, name, tensor.data_ptr())
        for name, tensor in grad.items():
            setattr(c, f"d_{name}", tensor.data_ptr())
        made: list[Tensor | None] = [None] * 6
        keys, width, value_width = c.keys, c.width, c.value_width
        groups = self.groups
        rows = self.outputs["log_normalizer"]
        if needs[0]:
            made[0] = torch.empty((*rows, width), dtype=self.dtype, device="cpu")
            c.d_eta = made[0].data_ptr()
        if needs[1]:
            made[1] = torch.empty((*groups, keys, width), dtype=self.dtype, device="cpu")
            c.d_atoms = made[1].data_ptr()
        if needs[2] and grad.keys() & {"mean", "value_trace"}:
            made[2] = torch.empty((*groups, keys, value_width), dtype=self.dtype, device="cpu")
            c.d_values = made[2].data_ptr()
        if needs[3] and self.per_pair:
            made[3] = self.of_pairs(c, torch.zeros(x[3].shape, dtype=self.dtype, device="cpu"))  # pyright: ignore[reportOptionalMemberAccess]
        elif needs[3]:
            made[3] = torch.empty((*groups, keys), dtype=self.dtype, device="cpu")
            c.d_per_atom = made[3].data_ptr()
        if needs[5]:
            made[5] = torch.empty(rows, dtype=self.dtype, device="cpu")
            c.d_sink = made[5].data_ptr()
        irregular = enter("backward", c, 1 if self.shared_pairs and made[3] is not None else None)
        del alive
        return None if irregular else self._summed(x, made)

    def of_pairs(self, c: Call, table: Tensor) -> Tensor:
        """A table for gradients of weights of pairs, to which the call adds."""
        strides = self.geometry.strides["d_per_pair"]
        point(c.d_per_pair, table, strides, c.keys if table.shape[-2] > 1 else 0)
        return table

    def _summed(self, x: Sequence[Tensor | None], made: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of broadcast arguments are summed over what they were broadcast to."""
        queries = self.outputs["log_normalizer"][-1]
        for index, tensor in enumerate(made):
            own, target = x[index], self.targets[index]
            if tensor is None or own is None or target is None or (index == 3 and self.per_pair):
                continue
            if index == 5:
                tensor = tensor.sum(-1)
            if index in (0, 5):
                tail = (queries, own.shape[-1]) if index == 0 else ()
                tensor = tensor.reshape((*self.lead, *tail))
            if tensor.shape != target:
                tensor = tensor.sum_to_size(target)
            made[index] = tensor.reshape(own.shape).to(own.dtype)
        if made[3] is not None:
            made[3] = made[3].to(x[3].dtype)  # pyright: ignore[reportOptionalMemberAccess]
        return made


def make_plan(
    x: Arguments,
    settings: MomentsSettings,
    check: Check,
    key_side: Mapping[str, Tensor] = MappingProxyType({}),
    kind: type[DirectPlan] = DirectPlan,
) -> DirectPlan | None:
    """A plan for arguments of these shapes; a sentence where they do not fit each other.

    key_side  more of the key side: "marked" (*batch, n) and "starts" (*batch)
    """
    found = check(x, settings)
    if not kind.reads(x) or x.eta.ndim < 2 or 0 in found.lead:
        return None
    dtype = torch.float32 if x.eta.dtype in (torch.float16, torch.bfloat16) else x.eta.dtype
    prepared = tuple(i for i, t in enumerate(x) if t is not None and not _is_readable(i, t, x.atoms, dtype))
    # strides of a copy are those of a contiguous tensor; no data is needed to know them
    y = [t if i not in prepared or t is None else _readable(i, t.to("meta"), x.atoms, dtype) for i, t in enumerate(x)]
    q, n, width = x.eta.shape[-2], x.atoms.shape[-2], x.eta.shape[-1]
    ratio = found.ratio
    lead = (*found.lead[:-1], found.lead[-1] // ratio, ratio) if ratio > 1 else tuple(found.lead)
    per_pair = found.per_pair
    tails = {"eta": 2, "atoms": 2, "values": 2, "log_weights": 2 if per_pair else 1, "mask": 2, "sink": 0}
    strides, targets = {}, []
    for name, tensor in zip(Arguments._fields, y, strict=True):
        if tensor is None:
            targets.append(None)
            continue
        of_keys = name in ("atoms", "values") or (name == "log_weights" and not per_pair)
        tail = min(tails[name], tensor.ndim)
        sizes = tensor.shape[: tensor.ndim - tail]
        label = name if name != "log_weights" else "per_pair" if per_pair else "per_atom"
        strides[label] = _lead_strides(sizes, tensor.stride(), len(found.lead), ratio, of_keys)
        if label == "per_pair":
            plain = torch.empty(tensor.shape, device="meta").stride()
            strides["d_per_pair"] = _lead_strides(sizes, plain, len(found.lead), ratio, of_keys)
        split = split_axes(sizes, len(found.lead), ratio, of_keys)
        targets.append((*split, *tensor.shape[tensor.ndim - tail :]))
    rows = torch.empty((*found.lead, q), device="meta").stride()[:-1]
    strides["output"] = _lead_strides(found.lead, rows, len(found.lead), ratio, False)
    for name, tensor in key_side.items():
        sizes = tensor.shape[:-1] if name == "marked" else tensor.shape
        strides[name] = _lead_strides(sizes, tensor.stride(), len(found.lead), ratio, True)
    shape = geometry(lead, strides)
    if shape is None:
        return None
    names = _closed(settings.wanted, x)
    if not kind.forms(names, x):
        return None
    if x.values is not None and "mean" not in names:
        return None  # the kernel would not look at the values, which may hide what is not finite
    mask_rows = x.mask is not None and (
        (x.mask.ndim > 1 and x.mask.shape[-2] > 1) or ("mask" in strides and shape.strides["mask"][4] != 0)
    )
    if names & set(TRACES) and (settings.window is not None or per_pair or mask_rows):
        return None  # needs a centre, and a look at rows that are far from it
    c = Call()
    c.axes[:] = shape.axes
    c.fold, c.period, c.keys, c.width = shape.fold, q, n, width
    c.value_width = width if x.values is None else x.values.shape[-1]
    c.precision = 8 if dtype == torch.float64 else 4
    c.causal, c.window, c.offset = int(settings.causal), found.window or 0, found.offset
    c.scale = settings.scale
    for name, tensor in zip(Arguments._fields, y, strict=True):
        if tensor is None:
            continue
        label = name if name != "log_weights" else "per_pair" if per_pair else "per_atom"
        operand = getattr(c, label)
        operand.dtype = DTYPES[tensor.dtype]
        operand.group[:], operand.fold = shape.strides[label][:4], shape.strides[label][4]
        if label == "per_atom":
            operand.row = 1
        elif label != "sink":
            operand.row = tensor.stride(-2) if tensor.ndim > 1 and tensor.shape[-2] > 1 else 0
    for label in ("output", *(name for name in key_side if name == "marked")):
        operand = getattr(c, label)
        operand.group[:], operand.fold = shape.strides[label][:4], shape.strides[label][4]
    lengths = {"mean": c.value_width, "atom_mean": width}
    order = ("log_normalizer", *sorted(names - {"log_normalizer"}))
    outputs = {name: (*found.lead, q, *([lengths[name]] if name in VECTORS else [])) for name in order}
    shared = per_pair and any(
        size > 1 and step == 0 for size, step in zip(shape.axes, shape.strides["d_per_pair"][:4], strict=True)
    )
    return kind(bytes(c), outputs, dtype, prepared, per_pair, shape, lead, tuple(targets), shared)


def _closed(wanted: frozenset[str], x: Arguments) -> set[str]:
    """The wanted statistics, G, and the means that variances are about."""
    names = {"log_normalizer", *wanted, *(CENTRED[name] for name in wanted & CENTRED.keys())}
    if x.log_weights is None and x.sink is None:
        names.discard("mean_log_weight")
    return names | {"sink_mass"} if x.sink is not None else names


def split_axes(sizes: Sequence[int], rank: int, ratio: int, of_keys: bool) -> list[int]:
    """Batch axes of a tensor as those of the answer, the last one split into heads of keys and heads that share one."""
    full = [1] * (rank - len(sizes)) + list(sizes)
    if ratio == 1:
        return full
    last = full[-1]
    return [*full[:-1], last, 1] if of_keys else [*full[:-1], *((last // ratio, ratio) if last > 1 else (1, 1))]


def _lead_strides(
    sizes: Sequence[int], strides: Sequence[int], rank: int, ratio: int, of_keys: bool
) -> tuple[int, ...]:
    """Strides along the batch axes of the answer, 0 where a tensor is shared, split as by `split_axes`."""
    full = [0] * (rank - len(sizes)) + [
        step if size > 1 else 0 for size, step in zip(sizes, strides[: len(sizes)], strict=True)
    ]
    if ratio == 1:
        return tuple(full)
    last = full[-1]
    return (*full[:-1], last, 0) if of_keys else (*full[:-1], last * ratio, last)


def _is_readable(index: int, tensor: Tensor, atoms: Tensor, dtype: torch.dtype) -> bool:
    """Entries of a row lie side by side; weights and sinks have the precision of sums; a mask names every key."""
    if index in (3, 5) and tensor.dtype != dtype:
        return False
    if index == 5:
        return True
    if index == 4 and (tensor.ndim < 2 or tensor.shape[-1] != atoms.shape[-2]):
        return False
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def _readable(index: int, tensor: Tensor, atoms: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that the kernel can read; see `_is_readable`."""
    if index in (3, 5):
        tensor = tensor.detach().to(dtype)
    if index == 4:
        tensor = (tensor if tensor.ndim > 1 else tensor[None]).expand(
            *tensor.shape[:-1], *((1,) if tensor.ndim < 2 else ()), atoms.shape[-2]
        )
    return tensor.contiguous()


# ---------------------------------------------------------------------- gradients


class DirectMoments(torch.autograd.Function):
    """The call as a function of its tensors; a second derivative goes the way of flattened inputs."""

    @staticmethod
    def forward(ctx, plan: DirectPlan, flat: Flat, settings: MomentsSettings, *x: Tensor | None):
        out, _, irregular = plan.forward(x)
        ctx.irregular = irregular
        if irregular:
            computed = flat(Arguments(*x), settings)  # pyright: ignore[reportArgumentType]
            out = {name: computed[name] for name in plan.outputs}
        ctx.plan, ctx.flat, ctx.settings = plan, flat, settings
        ctx.save_for_backward(*x, *out.values())
        ctx.set_materialize_grads(False)
        return tuple(out.values())

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        plan: DirectPlan = ctx.plan
        saved = ctx.saved_tensors  # once: checkpoints recompute them
        x, out = saved[:6], dict(zip(plan.outputs, saved[6:], strict=True))
        needs = ctx.needs_input_grad[3:]
        incoming = {name: g for name, g in zip(plan.outputs, grads, strict=True) if g is not None}
        if not incoming:
            return (None,) * 9
        made = None
        plain = peek_interpreter_stack() is None and all(map(_has_memory, incoming.values()))
        if plain and not torch.is_grad_enabled() and not ctx.irregular and "max_score" not in incoming:
            made = _closed_form(plan, x, out, incoming, needs)
        if made is None:
            made = _by_autograd(Arguments(*x), ctx.settings, ctx.flat, incoming, needs)
        return (None, None, None, *made)


def _has_memory(tensor: Tensor) -> bool:
    """Whether a gradient has numbers that the kernel can read; those of ``is_grads_batched`` have not."""
    return type(tensor) in PLAIN and not is_legacy_batchedtensor(tensor)


def _closed_form(plan: DirectPlan, x, out: dict[str, Tensor], incoming: dict[str, Tensor], needs):
    """Gradients by the kernel; None if they are not finite."""
    incoming = {name: g.contiguous().resolve_neg() for name, g in incoming.items()}
    of_sink = incoming.pop("sink_mass", None)
    if of_sink is not None:  # e^{s − G}
        moved = of_sink * out["sink_mass"]
        incoming["log_normalizer"] = incoming["log_normalizer"] - moved if "log_normalizer" in incoming else -moved
    made = plan.backward(x, out, {name: incoming[name] for name in GRADIENTS_IN if name in incoming}, needs)
    if made is not None and of_sink is not None and made[5] is not None:
        target: tuple[int, ...] = plan.targets[5] or ()
        direct = (of_sink * out["sink_mass"]).sum(-1).reshape(plan.lead).sum_to_size(target)
        made[5] = made[5] + direct.reshape(made[5].shape).to(made[5].dtype)
    return made


def _node(tensor: Tensor, need: bool, again: bool) -> Tensor:
    return tensor if not need else tensor.view_as(tensor) if again else tensor.detach().requires_grad_()


def _by_autograd(x: Arguments, settings: MomentsSettings, flat: Flat, incoming: dict[str, Tensor], needs):
    """Gradients through flattened inputs, differentiable where gradients are enabled."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # a node of its own for every argument: one tensor may be several of them
        own = [t if t is None else _node(t, need, again) for t, need in zip(x, needs, strict=True)]
        x = Arguments(*own)  # pyright: ignore[reportArgumentType]
        out = flat(x, settings)
        wanted = [t for t, need in zip(x, needs, strict=True) if need and t is not None]
        names = [name for name in incoming if out[name].requires_grad]
        slopes = torch.autograd.grad(
            [out[name] for name in names],
            wanted,
            [incoming[name] for name in names],
            create_graph=again,
            allow_unused=True,
        )
    left = iter(slopes)
    return [next(left) if need else None for need in needs]
