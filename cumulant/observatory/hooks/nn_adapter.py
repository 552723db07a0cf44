"""The layers of `cumulant.nn` as the observatory sees them: their calls in the form that calls of transformers have.

These layers report every attention call themselves (`cumulant.nn.calls`). What they report may combine a causal order
with a mask, or leave a query without a key; here it becomes one mask, and such queries are no rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from cumulant.kernels.arguments import Support, intersect
from cumulant.nn.blocks import SequenceBlock
from cumulant.nn.calls import AttentionCall
from cumulant.nn.hopfield import Hopfield
from cumulant.nn.projected import ProjectedAttention

REPORTING_LAYERS = (ProjectedAttention, SequenceBlock, Hopfield)  # the modules that call `report_attention` themselves


def reporting_layers(model: nn.Module) -> list[str]:
    """Paths of the layers inside ``model`` that report their attention calls themselves.

    >>> from cumulant.nn import EnergyBlock
    >>> reporting_layers(nn.ModuleDict({"blocks": nn.ModuleList([EnergyBlock(4, 2)])}))
    ['blocks.0']
    """
    return [name for name, module in model.named_modules() if isinstance(module, REPORTING_LAYERS)]


def written_out(call: AttentionCall) -> tuple[Support, Tensor | None]:
    """The support of a call with four axes for mask and weights, and the queries (batch, q) that see a key.

    A causal order that is not the plain one, as of tokens that do not see themselves, is written out in the mask, and
    so are windows and an order beside a mask. A query that some head leaves without a key is left out of all of them;
    None: no query is.
    """
    heads, q, n = call.eta.shape[1], call.eta.shape[2], call.key.shape[2]
    given, device = call.support, call.eta.device
    given = replace(given, offset=n - q) if given.offset is None else given
    mask, causal = given.pair_mask(), given.causal
    if given.window is not None or (causal and (given.offset or n != q or mask is not None)):
        mask, causal = intersect(mask, given.band(torch.arange(q, device=device), n)), False
    rows = None
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).expand(-1, -1, q, n)
        if given.sink is None:
            seen = mask.any(-1).all(1)  # (batch or 1, q)
            rows = None if bool(seen.all()) else seen.expand(len(call.eta), q)
    weights, sink = given.pair_weights(heads), given.sink
    if weights is not None:
        weights = weights.float().expand(-1, heads, q, n)
    if sink is not None:
        sink = torch.as_tensor(sink, dtype=torch.float32, device=device).reshape(1, -1).expand(1, heads)
    offset = 0 if causal else None
    return Support(mask, causal, offset, log_weights=weights, sink=sink), rows
