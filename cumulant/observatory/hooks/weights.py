"""The weights of a head, split by head and with the norm in front of it folded in.

    q_i = W_Q x_i,   k_j = W_K x_j,   v_j = W_V x_j,   the head adds W_O Σ_j a_ij v_j to the stream

Where the norm in front has a gain g, x is the normed state without its gain and W_Q, W_K, W_V are W diag(g). Biases are
left out and rotary embeddings are taken at offset 0, where they are the identity (or a constant factor, as in YaRN).
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import require_float, sentence, shape
from cumulant.nn.convex import ConvexBlock
from cumulant.nn.energy import EnergyBlock
from cumulant.nn.equilibrium import EquilibriumBlock
from cumulant.observatory.hooks.nn_weights import layer_front, layer_projections
from cumulant.observatory.hooks.structure import (
    QUERY_KEY_NORMS,
    REPORTING_LAYERS,
    Norm,
    NotFound,
    block_of,
    norm_of,
    norms_of,
    twin,
)
from cumulant.residual import gradientness

# names of the four projections, as modules have them
INPUT_PROJECTIONS = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
)
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "o", "out_lin", "dense", "Wo")
HEAD_WIDTH = ("head_dim", "attention_head_size", "key_value_proj_dim")
HEAD_COUNT = ("num_heads", "num_attention_heads", "n_heads")
CROSS_ATTENTION_SOURCES = ("encoder_hidden_states", "key_value_states")


Projections = dict[str, tuple[str, tuple[int, int]]]  # query, key, value: the child that has it, (part, parts)


class HeadWeights(NamedTuple):
    """Projections of one attention module, per query head, float64.

    query     (heads, d, D)
    key       (heads, d, D)    shared key heads repeated for the queries of their group
    value     (heads, e, D)
    output    (heads, D, e)
    gain      (D,) of the norm in front, already in query (and in key and value if they read the same state); or None
    crossed   keys and values read another stream (an encoder's): W_Qᵀ W_K then joins two spaces
    normed    queries and keys are divided by their own length afterwards, which no weight contains; gains are folded in
    passed    (D,) gain of a norm that the stream itself passes: the weights read and write states with it; or None
    hidden    they read a state that is neither the block's nor a norm's: its covariance is not kept
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    gain: Tensor | None
    crossed: bool
    normed: bool
    passed: Tensor | None = None
    hidden: bool = False


class NormsInFront(NamedTuple):
    """The norm whose output each projection reads; None: the state of the block itself."""

    query: str | None
    key: str | None
    value: str | None
    crossed: bool


@torch.no_grad()
def head_weights(model: nn.Module, name: str) -> HeadWeights | NotFound:
    """The weights of the attention module at path ``name``, or why they are not known.

    Which norm stands in front is found by running a twin of the block on random states as far as the projections.
    Nothing is guessed: fused projections other than GPT-2's, low-rank ones, or an operation between norm and projection
    give `NotFound(reason)`.
    """
    module = _module(model, name)
    if isinstance(module, REPORTING_LAYERS):
        return _layer_weights(model, name, module)
    projections = _projections(module)
    if isinstance(projections, NotFound):
        return projections
    output = output_projection(model, name)
    if isinstance(output, NotFound):
        return output
    matrices = {k: _matrix(getattr(module, path), part) for k, (path, part) in projections.items()}
    matrices["output"] = _matrix(output, (0, 1))
    for k, w in matrices.items():
        if w is None:
            return NotFound(f"the {k} projection of {type(module).__name__} has no matrix of floating numbers")
    split = _split(module, matrices)  # pyright: ignore[reportArgumentType]
    if isinstance(split, NotFound):
        return split
    front = _norms_in_front(model, name, projections)
    return front if isinstance(front, NotFound) else _fold(model, name, split, front)


def _layer_weights(model: nn.Module, name: str, module: nn.Module) -> HeadWeights | NotFound:
    """Weights of a layer of `cumulant.nn`.

    Attention stands beside the stream, so that the gain of the norm in front is folded in. What a convex block reads is
    the stream: its gain is passed on. Energy and equilibrium blocks read a state that they make themselves.
    """
    projections = layer_projections(module)
    if isinstance(projections, NotFound):
        return projections
    bare = HeadWeights(
        projections["query"], projections["key"], projections["value"], projections["output"], None, False, False
    )
    if isinstance(module, EnergyBlock | EquilibriumBlock):
        return bare._replace(hidden=True)
    front = layer_front(model, name)
    if isinstance(module, ConvexBlock):
        return bare._replace(passed=front.gain if isinstance(front, Norm) else None, hidden=isinstance(front, NotFound))
    if front is None or isinstance(front, NotFound):
        return bare if front is None else front
    g = front.gain
    return bare._replace(query=bare.query * g, key=bare.key * g, value=bare.value * g, gain=g)


def ascent_index(weights: HeadWeights, covariance: Tensor, scale: float = 1.0) -> Tensor:
    """How far a head climbs its own log-normalizer in coordinates where the states are white (S1-F2).

        B = s S^½ W_Qᵀ W_K S^½,   V = S^{−½} W_O W_V S^½,        tr(V Bᵀ) / (|V| |B|)

    Below 0 a layer makes its tokens more Gaussian, above 0 it clusters them. covariance (D, D) of the states that the
    folded weights read; directions without variance, as the one that a LayerNorm takes away, are left out. Returns
    (heads,) float64, 0 where a product vanishes.

    >>> import torch
    >>> w = torch.eye(2, 4, dtype=torch.float64)[None]
    >>> ascent_index(HeadWeights(w, w, w, -w.mT, None, False, False), torch.eye(4))
    tensor([-1.], dtype=torch.float64)
    """
    where, dim = "ascent_index.covariance", weights.query.shape[-1]
    if require_float(where, covariance).shape != (dim, dim):
        raise ValueError(sentence(where, f"shape (D={dim}, D={dim})", shape(covariance), "One row per channel."))
    if weights.key.shape[-1] != dim:
        got = f"queries from {dim} and keys from {weights.key.shape[-1]} channels"
        raise ValueError(sentence("ascent_index.weights", "self-attention", got, "Leave cross-attention out."))
    s = covariance.double().cpu()
    value, basis = torch.linalg.eigh((s + s.mT) / 2)
    positive = value > 8 * torch.finfo(torch.float32).eps * value.amax()  # sums over states are in single precision
    up = torch.where(positive, value, 0).sqrt()
    down = torch.where(positive, 1 / torch.where(positive, up, 1), 0)
    root, inverse = (basis * up) @ basis.mT, (basis * down) @ basis.mT
    query, key, value = (w.double().cpu() @ root for w in (weights.query, weights.key, weights.value))
    index = gradientness(query, key, value, inverse @ weights.output.double().cpu())
    return index * float(torch.sign(torch.tensor(scale)))


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        expected = f"the path of a module of {type(model).__name__}"
        raise ValueError(sentence("head_weights.name", expected, repr(name), "Take AttentionCall.name.")) from None


def _projections(module: nn.Module) -> Projections | NotFound:
    """For query, key and value: the child that holds it and which part of how many."""
    for names in INPUT_PROJECTIONS:
        if all(isinstance(getattr(module, n, None), nn.Module) for n in names):
            return {k: (n, (0, 1)) for k, n in zip(("query", "key", "value"), names, strict=True)}
    fused = getattr(module, "c_attn", None)
    if type(fused).__name__ == "Conv1D":
        if isinstance(getattr(module, "q_attn", None), nn.Module):
            return {"query": ("q_attn", (0, 1)), "key": ("c_attn", (0, 2)), "value": ("c_attn", (1, 2))}
        return {k: ("c_attn", (i, 3)) for i, k in enumerate(("query", "key", "value"))}
    children = ", ".join(name for name, _ in module.named_children()) or "nothing"
    return NotFound(f"{type(module).__name__} holds {children}: no query, key and value projections by a known name")


def output_projection(model: nn.Module, name: str) -> nn.Module | NotFound:
    """The module with W_O of the attention module at ``name``: a child, or the dense layer of the sibling `output`
    (BERT)."""
    module = model.get_submodule(name)
    for child in OUTPUT_PROJECTIONS:
        if isinstance(getattr(module, child, None), nn.Module):
            return getattr(module, child)
    parent = model.get_submodule(name.rpartition(".")[0])
    dense = getattr(getattr(parent, "output", None), "dense", None)
    if isinstance(dense, nn.Module):
        return dense
    return NotFound(f"{type(module).__name__} has no output projection by a known name, nor has its parent")


def head_outputs(model: nn.Module, name: str) -> Tensor | NotFound:
    """W_O of the attention module at ``name`` split by head, (heads, D, e), float64.

    >>> from cumulant.nn import MultiheadAttention
    >>> head_outputs(nn.ModuleDict({"a": MultiheadAttention(8, 2)}), "a").shape
    torch.Size([2, 8, 4])
    """
    projection, module = output_projection(model, name), model.get_submodule(name)
    if isinstance(projection, NotFound):
        return projection
    matrix, heads = _matrix(projection, (0, 1)), head_count(module)
    if matrix is None:
        return NotFound(f"the output projection of {type(module).__name__} has no matrix of floating numbers")
    if not heads or matrix.shape[1] % heads:
        return NotFound(f"{type(module).__name__} does not say into how many heads {matrix.shape[1]} numbers are split")
    return matrix.unflatten(1, (heads, -1)).transpose(0, 1)


def head_count(module: nn.Module) -> int | None:
    """Heads of an attention module, as it or its configuration says; None if neither does."""
    config = getattr(module, "config", None)
    return next((n for o in (module, config) for a in HEAD_COUNT if isinstance(n := getattr(o, a, None), int)), None)


def _matrix(layer: nn.Module, part: tuple[int, int]) -> Tensor | None:
    """(out, in) float64: Conv1D stores (in, out)."""
    w = getattr(layer, "weight", None)
    if not isinstance(w, Tensor) or w.ndim != 2 or not w.is_floating_point() or w.is_meta:
        return None
    w = w.detach().double().cpu()
    w = w.mT if type(layer).__name__ == "Conv1D" else w
    index, parts = part
    return w.chunk(parts)[index] if len(w) % parts == 0 else None


def _split(module: nn.Module, w: dict[str, Tensor]) -> dict[str, Tensor] | NotFound:
    """Rows by head; every size must fit."""
    kind = type(module).__name__
    count = head_count(module)
    d = next((n for a in HEAD_WIDTH if isinstance(n := getattr(module, a, None), int)), None)
    d = len(w["query"]) // count if d is None and count else d
    if not d or len(w["query"]) % d or len(w["key"]) % d:
        return NotFound(f"the head size of {kind} is not known")
    heads, key_heads = len(w["query"]) // d, len(w["key"]) // d
    if count not in (None, heads):
        return NotFound(f"{kind} has {count} heads but query rows for {heads}")
    if not key_heads or heads % key_heads or len(w["value"]) % key_heads:
        return NotFound(f"{kind} has {heads} query heads, {key_heads} key heads and {len(w['value'])} value rows")
    query, key, value = (
        w[k].reshape(n, -1, w[k].shape[1]) for k, n in zip(w, (heads, key_heads, key_heads), strict=False)
    )
    if w["output"].shape[1] != heads * value.shape[1]:
        return NotFound(f"the output projection of {kind} reads {w['output'].shape[1]} numbers, heads give others")
    output = w["output"].reshape(len(w["output"]), heads, -1).transpose(0, 1)  # (heads, D, e)
    group = heads // key_heads
    return {
        "query": query,
        "key": key.repeat_interleave(group, 0),
        "value": value.repeat_interleave(group, 0),
        "output": output,
    }


class _ProjectionsReached(Exception):
    """All projections have been called; the rest of the block is not needed."""


def _norms_in_front(model: nn.Module, name: str, projections: Projections) -> NormsInFront | NotFound:
    """Run a twin of the block on random states until the projections have read theirs, and see whose they are."""
    path = block_of(model, name, whole=False)
    if path is None:
        return NotFound("the module is in no list of blocks, so what stands in front of it is not known")
    block = twin(model.get_submodule(path))
    attention = block.get_submodule(name.removeprefix(path).removeprefix("."))
    read: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    children = {child for child, _ in projections.values()}

    def reads(child: str):
        def hook(module, args):
            read[child] = args[0]
            if read.keys() == children:
                raise _ProjectionsReached

        return hook

    def makes(norm: str):
        def hook(module, args, output):
            made[norm] = output

        return hook

    for child in children:
        getattr(attention, child).register_forward_pre_hook(reads(child))
    for norm, module in norms_of(block).items():
        module.register_forward_hook(makes(norm))
    states = _run_to_projections(block, model.get_submodule(name), projections)
    if isinstance(states, NotFound):
        return states
    origin = {}
    for k, (child, _) in projections.items():
        flat = read[child].flatten()
        same = [s for s, t in (states | made).items() if t.numel() == len(flat) and torch.equal(t.flatten(), flat)]
        if not same:
            return NotFound(f"what {k} reads is neither the state of the block nor the output of a norm in it")
        origin[k] = same[0]
    norms = {k: None if source in states else source for k, source in origin.items()}
    return NormsInFront(norms["query"], norms["key"], norms["value"], origin["key"] != origin["query"])


def _run_to_projections(
    block: nn.Module, attention: nn.Module, projections: Projections
) -> dict[str, Tensor] | NotFound:
    """Call the block; the state and, for cross-attention, the source that it was given."""
    weights = {k: getattr(attention, child).weight for k, (child, _) in projections.items()}
    generator = torch.Generator().manual_seed(0)

    def states(k: str) -> Tensor:
        w, conv = weights[k], type(getattr(attention, projections[k][0])).__name__ == "Conv1D"
        x = torch.randn(1, 2, w.shape[0 if conv else 1], generator=generator)
        return x.to(w)

    x, source = states("query"), states("key")
    first, *others = inspect.signature(block.forward).parameters.values()
    arguments = {p.name: None for p in others if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    arguments |= {p.name: source for p in others if p.name in CROSS_ATTENTION_SOURCES}
    try:
        block.forward(**{first.name: x}, **arguments)
    except _ProjectionsReached:
        return {"state": x, "source": source}
    except Exception as error:  # a block called without its model around it may fail in any way
        reason = f"{type(block).__name__} could not be run as far as its projections ({type(error).__name__})"
        return NotFound(reason)
    return NotFound(f"{type(block).__name__} runs without these projections")


def _fold(model: nn.Module, name: str, w: dict[str, Tensor], front: NormsInFront) -> HeadWeights | NotFound:
    """Gains of the norms in front into the columns, those of norms on queries and keys into the rows."""
    block = model.get_submodule(block_of(model, name, whole=False) or "")
    gains: dict[str, Tensor] = {}
    for k in ("query", "key", "value"):
        path = getattr(front, k)
        if path is not None:
            norm = norm_of(block.get_submodule(path), w[k].shape[-1])
            if isinstance(norm, NotFound):
                return norm
            gains[k] = norm.gain
    normed = _fold_query_key_norms(model.get_submodule(name), w)
    if isinstance(normed, NotFound):
        return normed
    query, key, value = (w[k] * gains[k] if k in gains else w[k] for k in ("query", "key", "value"))
    return HeadWeights(query, key, value, w["output"], gains.get("query"), front.crossed, normed)


def _fold_query_key_norms(module: nn.Module, w: dict[str, Tensor]) -> bool | NotFound:
    """Norms that the module puts on its queries and keys: their gains into the rows of w. Whether there are any."""
    inside = {name: child for name, child in module.named_modules() if "Norm" in type(child).__name__}
    for name, child in inside.items():
        k = QUERY_KEY_NORMS.get(name)
        heads, d, _ = w["query"].shape
        stored = getattr(child, "weight", None)
        width = len(stored) if isinstance(stored, Tensor) else d
        norm = norm_of(child, width) if k else NotFound("")
        if k is None or isinstance(norm, NotFound) or width % d or (norm.centred and width != d):
            return NotFound(f"{name} of {type(module).__name__} is no norm on queries or keys of a known kind")
        gain = norm.gain.unflatten(0, (-1, d))  # (1, d): the same for all heads; or one row per head
        gain = gain.repeat_interleave(heads // len(gain), 0)
        w[k] = gain[..., None] * (w[k] - w[k].mean(1, keepdim=True) if norm.centred else w[k])
    return bool(inside)
