"""The structure of a model: the transformer inside its wrappers, its attention modules, blocks and norms.

Nothing here knows an architecture by name. What a norm does is found by trying it, not by reading its class. A record
has the paths of the modules of the model inside, so that it is the same with and without what `torch.compile`, data
parallelism or a pooling module put around it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.nn.blocks import SequenceBlock
from cumulant.nn.hopfield import Hopfield
from cumulant.nn.projected import ProjectedAttention
from cumulant.nn.wrappers import is_transformers, without_wrappers

REPORTING_LAYERS = (ProjectedAttention, SequenceBlock, Hopfield)  # the modules that call `report_attention` themselves
EXPECTED = "a transformers model, or one with layers of cumulant.nn"


def unwrapped(model: object) -> nn.Module:
    """The model that is observed when ``model`` is.

    `torch.compile(m)`, DataParallel, DistributedDataParallel and FSDP are taken off. Of a module that is no
    transformers model itself the one inside is taken; with none, or several, or layers of `cumulant.nn` beside it, it
    is refused with what to pass.

    >>> unwrapped(nn.Linear(2, 2))
    Traceback (most recent call last):
    TypeError: attach.model: expected a transformers model, or one with layers of cumulant.nn, got Linear. Load one with
    AutoModel.from_pretrained(...).
    """
    if not isinstance(model, nn.Module):
        advice = "Pass the model itself, not a function that calls it."
        raise TypeError(sentence("attach.model", EXPECTED, f"a {type(model).__name__}", advice))
    inner = without_wrappers(model)
    if is_transformers(inner):
        return inner
    inside, own_layers = transformers_models(inner), reporting_layers(inner)
    own_layers = [name for name in own_layers if not any(_is_under(name, path) for path in inside)]
    if not inside and own_layers:
        return inner
    if not inside:
        advice = "Load one with AutoModel.from_pretrained(...)."
        raise TypeError(sentence("attach.model", EXPECTED, type(inner).__name__, advice))
    if len(inside) == 1 and not own_layers:
        return without_wrappers(*inside.values())
    named = [f"{type(inner.get_submodule(path)).__name__} at .{path}" for path in (*inside, *own_layers[:1])]
    first, *others = (f"attach(model.{path})" for path in (*inside, *own_layers[:1]))
    advice = f"Pass one of them, {' or '.join([first, *others])}, and call the whole as before."
    raise TypeError(sentence("attach.model", "one model", f"{type(inner).__name__} with {', '.join(named)}", advice))


def transformers_models(model: nn.Module) -> dict[str, nn.Module]:
    """Paths and modules of the outermost transformers models in ``model``, itself included; each of them once."""
    named = {name: module for name, module in model.named_modules() if is_transformers(module)}
    return {name: m for name, m in named.items() if not any(_is_under(name, o) for o in named if o != name)}


def _is_under(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


# norms of queries and keys, as attention modules have them
QUERY_KEY_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "query"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "key"),
}


class NotFound(NamedTuple):
    """Why something about a model could not be found out."""

    reason: str


class Norm(NamedTuple):
    """A norm as it acts: gain · (x − centred · mean x) / σ + shift.

    gain      (D,) float64, the factor after the division (1 + weight for those that store it so)
    centred   True: the mean is taken off first (LayerNorm); False: it is not (RMSNorm)
    """

    gain: Tensor
    centred: bool


def reporting_layers(model: nn.Module) -> list[str]:
    """Paths of the layers inside ``model`` that report their attention calls themselves.

    >>> from cumulant.nn import EnergyBlock
    >>> reporting_layers(nn.ModuleDict({"blocks": nn.ModuleList([EnergyBlock(4, 2)])}))
    ['blocks.0']
    """
    return [name for name, module in model.named_modules() if isinstance(module, REPORTING_LAYERS)]


def attention_modules(model: nn.Module) -> list[str]:
    """Paths of the innermost modules that call themselves attention, or are layers of `cumulant.nn` that attend."""
    reporting = reporting_layers(model)
    named = [
        name
        for name, m in model.named_modules()
        if name in reporting or any(s in type(m).__name__ for s in ("Attention", "Attn"))
    ]
    return [name for name in named if not any(other.startswith(f"{name}.") for other in named)]


def first_paths(paths: Sequence[str], most: int = 3) -> str:
    """The first few paths of modules, and how many more there are.

    >>> first_paths(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(path or "the model itself" for path in paths[:most]) + more


def list_elements(model: nn.Module, kinds: type | tuple[type, ...] = nn.ModuleList) -> dict[str, nn.Module]:
    """Paths and modules of everything that stands in a list of modules."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]
    return {f"{name}.{k}" if name else k: child for name, m in lists for k, child in m.named_children()}


def block_of(model: nn.Module, name: str, *, whole: bool = True, sequential: bool = False) -> str | None:
    """Path of the block around the module at ``name``: the nearest ancestor that is an element of an nn.ModuleList.

    whole       pass over lists of which some element has no attention (T5 lists the sublayers of a block), unless
                there is no other
    sequential  without such an ancestor, take the outermost that is an element of an nn.Sequential

    The module itself may be the block. None if there is none.

    >>> from torch import nn
    >>> class Attention(nn.Module): ...
    >>> sublayers = nn.ModuleList([nn.Sequential(Attention()), nn.Linear(2, 2)])
    >>> model = nn.ModuleDict({"block": nn.ModuleList([nn.ModuleDict({"layer": sublayers})])})
    >>> block_of(model, "block.0.layer.0.0"), block_of(model, "block.0.layer.0.0", whole=False)
    ('block.0', 'block.0.layer.0')
    """
    parts = name.split(".") if name else []
    paths = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    parents = {path: model.get_submodule(path.rpartition(".")[0]) for path in paths}
    elements = [path for path in paths if isinstance(parents[path], nn.ModuleList)]
    if whole:
        for path in elements:
            if all(attention_modules(nn.ModuleList([sibling])) for sibling in parents[path].children()):
                return path
    if elements or not sequential:
        return elements[0] if elements else None
    return next((path for path in reversed(paths) if isinstance(parents[path], nn.Sequential)), None)


def norms_of(block: nn.Module) -> dict[str, nn.Module]:
    """The norms inside a block, but not those that attention puts on its queries and keys."""
    named = {name: m for name, m in block.named_modules() if "Norm" in type(m).__name__}
    return {name: m for name, m in named.items() if name.rpartition(".")[2] not in QUERY_KEY_NORMS}


@torch.no_grad()
def norm_of(module: nn.Module, dim: int) -> Norm | NotFound:
    """What ``module`` does to vectors of length ``dim``, found by trying it on a few.

    >>> import torch
    >>> norm_of(torch.nn.RMSNorm(3), 3)
    Norm(gain=tensor([1., 1., 1.], dtype=torch.float64), centred=False)
    """
    weight = getattr(module, "weight", None)
    like = weight if isinstance(weight, Tensor) else torch.zeros(0)
    if like.is_meta:
        return NotFound("the weight of its norm is not loaded")
    x = torch.randn(16, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = (x + 0.5).to(like)
    try:
        up, down = module.forward(inputs).double().cpu(), module.forward(-inputs).double().cpu()
    except (RuntimeError, TypeError):
        return NotFound(f"{type(module).__name__} does not take {dim} numbers")
    odd = (up - down) / 2  # what a shift leaves behind
    x = inputs.double().cpu()
    z = {True: x - x.mean(-1, keepdim=True), False: x}
    z = {centred: v / v.square().mean(-1, keepdim=True).sqrt() for centred, v in z.items()}
    stored = weight.double().cpu() if isinstance(weight, Tensor) else torch.ones(dim, dtype=torch.float64)
    tolerance = max(1e-3, 8 * torch.finfo(inputs.dtype).eps)
    for gain in (stored, 1 + stored, torch.ones_like(stored)):
        for centred in (True, False):
            if gain.shape == (dim,) and float((odd - gain * z[centred]).abs().max()) <= tolerance * float(
                odd.abs().max()
            ):
                return Norm(gain, centred)
    return NotFound(f"{type(module).__name__} is neither a LayerNorm nor an RMSNorm")


def twin(block: nn.Module, replaced: Mapping[nn.Module, nn.Module] | None = None) -> nn.Module:
    """A copy of ``block`` that shares its weights and has no hooks: calling it leaves no trace anywhere.

    replaced  modules inside it → what stands in their place in the copy
    """
    memo: dict[int, object] = {id(t): t for t in (*block.parameters(), *block.buffers())}
    memo |= {id(module): other for module, other in (replaced or {}).items()}
    for module in block.modules():
        memo |= {id(v): type(v)() for k, v in vars(module).items() if "hooks" in k and isinstance(v, dict)}
        if getattr(module, "config", None) is not None:
            memo[id(module.config)] = module.config
    return copy.deepcopy(block, memo).eval()


def state_of(output: object) -> Tensor | None:
    """The hidden state in what a block returned: the tensor itself, or the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    return first if isinstance(first, Tensor) else None


def input_of(args: tuple, kwargs: dict) -> tuple[Tensor | None, str | None]:
    """The state that a block is given, and under which keyword."""
    if args and isinstance(args[0], Tensor):
        return args[0], None
    x = kwargs.get("hidden_states")
    return (x, "hidden_states") if isinstance(x, Tensor) else (None, None)


def without_cache(args: tuple, kwargs: dict, length: int) -> tuple[tuple, dict] | None:
    """The same arguments with no cache of keys and values, if nothing but this call has filled it."""
    caches = [a for a in (*args, *kwargs.values()) if hasattr(a, "get_seq_length")]
    if any(int(cache.get_seq_length()) > length for cache in caches):
        return None
    drop = {id(c) for c in caches}
    return tuple(None if id(a) in drop else a for a in args), {
        k: None if id(v) in drop else v for k, v in kwargs.items()
    }


def sequences_of(args: tuple, kwargs: dict, batch: int, index: Tensor) -> tuple[tuple, dict]:
    """The same arguments with some of the sequences: every tensor that begins with the axis of the batch is indexed.

    Nested tuples are gone through; a tensor with one axis is no sequence of states or masks and stays.
    """

    def cut(value: object) -> object:
        if isinstance(value, Tensor) and value.ndim > 1 and len(value) == batch:
            return value[index.to(value.device)]
        if type(value) is tuple:
            return tuple(cut(v) for v in value)
        return value

    if len(index) == batch:
        return args, kwargs
    return tuple(cut(a) for a in args), {k: cut(v) for k, v in kwargs.items()}
