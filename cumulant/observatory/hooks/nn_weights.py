"""The weights of the layers of `cumulant.nn`, head by head.

MultiheadAttention   W_Q, W_K, W_V, W_O as torch has them
ConvexBlock          W_V = W_K and W_O = c W_Qᵀ: gradient-ness 1 by construction (X-12)
EnergyBlock          the same with c = 1, of the term in which a token is the query
EquilibriumBlock     four matrices of its own, which read the fixed point
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cumulant.nn.attention import MultiheadAttention
from cumulant.nn.convex import ConvexBlock
from cumulant.nn.energy import EnergyBlock
from cumulant.nn.equilibrium import EquilibriumBlock
from cumulant.observatory.hooks.structure import Norm, NotFound, block_of, norm_of, norms_of, twin


def layer_projections(module: nn.Module) -> dict[str, Tensor] | NotFound:
    """query, key (heads, d, D), value (heads, e, D) and output (heads, D, e) of one layer, float64."""
    if isinstance(module, MultiheadAttention):
        return _split(module)
    if isinstance(module, ConvexBlock):
        output: Tensor = module.log_gain.exp()[:, None, None] * module.query.mT
        weights = {"query": module.query, "key": module.key, "value": module.key, "output": output}
    elif isinstance(module, EnergyBlock):
        weights = {"query": module.query, "key": module.key, "value": module.key, "output": module.query.mT}
    elif isinstance(module, EquilibriumBlock):
        weights = {"query": module.query, "key": module.key, "value": module.value, "output": module.output.mT}
    else:
        return NotFound(f"{type(module).__name__} is a layer whose heads have no four matrices")
    return {name: w.detach().double().cpu() for name, w in weights.items()}


def _split(module: MultiheadAttention) -> dict[str, Tensor] | NotFound:
    if module.kdim != module.embed_dim or module.vdim != module.embed_dim:
        return NotFound("its keys or values have another width than its queries")
    if module.in_proj_weight is None:
        return NotFound("its projections are not stored as one")
    parts = module.in_proj_weight.detach().double().cpu().chunk(3)
    names = ("query", "key", "value")
    weights = {name: w.unflatten(0, (module.num_heads, -1)) for name, w in zip(names, parts, strict=True)}
    output = module.out_proj.weight.detach().double().cpu()  # (D, heads · d)
    return weights | {"output": output.unflatten(1, (module.num_heads, -1)).movedim(1, 0)}


@torch.no_grad()
def layer_front(model: nn.Module, name: str) -> Norm | NotFound | None:
    """The norm whose output the layer at ``name`` reads; None: it reads the state of its block.

    Found by running a twin of the block on random states, as for other models.
    """
    path = block_of(model, name)
    if path is None:
        return NotFound("the module is in no list of blocks, so what stands in front of it is not known")
    if path == name:
        return None
    block, width = twin(model.get_submodule(path)), _width(model.get_submodule(name))
    layer = block.get_submodule(name.removeprefix(f"{path}."))
    read: list[tuple] = []
    made: dict[str, Tensor] = {}
    layer.register_forward_pre_hook(lambda module, args: read.append(args))

    def makes(norm: str):
        def hook(module, args, output):
            made[norm] = output

        return hook

    for norm, module in norms_of(block).items():
        module.register_forward_hook(makes(norm))
    like = next(block.parameters())
    x = torch.randn(1, 2, width, generator=torch.Generator().manual_seed(0)).to(like)
    try:
        block(x)
    except Exception as error:  # a block called without its model around it may fail in any way
        return NotFound(f"{type(block).__name__} could not be run ({type(error).__name__})")
    count = 3 if isinstance(layer, MultiheadAttention) else 1
    if not read or any(not isinstance(t, Tensor) or t.shape != x.shape for t in read[0][:count]):
        return NotFound(f"what {type(layer).__name__} reads is no state of its block")
    if all(torch.equal(t, x) for t in read[0][:count]):
        return None
    for norm, wrote in made.items():
        if all(torch.equal(t, wrote) for t in read[0][:count]):
            return norm_of(block.get_submodule(norm), width)
    return NotFound("what it reads is neither the state of the block nor the output of a norm in it")


def _width(module: nn.Module) -> int:
    return module.embed_dim if isinstance(module, MultiheadAttention) else module.dim  # pyright: ignore[reportReturnType]
