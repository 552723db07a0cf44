"""The layers of `cumulant.nn` as the observatory sees them: their calls in the form that calls of transformers have.

These layers report every attention call themselves (`cumulant.nn.calls`). What they report may combine a causal order
with a mask, or leave a query without a key; here it becomes one mask, and such queries are no rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cumulant.nn.blocks import SequenceBlock
from cumulant.nn.calls import AttentionCall
from cumulant.nn.hopfield import Hopfield
from cumulant.nn.projected import Projected

REPORTING_LAYERS = (Projected, SequenceBlock, Hopfield)  # the modules that call `report_attention` themselves


def reporting_layers(model: nn.Module) -> list[str]:
    """Paths of the layers inside ``model`` that report their attention calls themselves.

    >>> from cumulant.nn import EnergyBlock
    >>> reporting_layers(nn.ModuleDict({"blocks": nn.ModuleList([EnergyBlock(4, 2)])}))
    ['blocks.0']
    """
    return [name for name, module in model.named_modules() if isinstance(module, REPORTING_LAYERS)]


def support_of(call: AttentionCall) -> tuple[dict, Tensor | None]:
    """Which keys a query sees, and the queries (batch, q) that see one; None: all do.

    An order that is not the plain one, as of tokens that do not see themselves, is written out in the mask, and so is
    one beside a mask. A query that some head leaves without a key is left out of all of them.
    """
    heads, q, n = call.eta.shape[1], call.eta.shape[2], call.key.shape[2]
    given = dict(call.support)
    causal, offset, mask = bool(given.pop("causal", False)), given.pop("offset", None), given.pop("mask", None)
    offset = n - q if offset is None else int(offset)
    if causal and (offset or n != q or mask is not None):
        order = torch.ones(q, n, dtype=torch.bool, device=call.eta.device).tril(offset)
        mask, causal = order if mask is None else mask & order, False
    support: dict = {"causal": causal} | ({"offset": 0} if causal else {})
    rows = None
    if mask is not None:
        support["mask"] = mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).expand(-1, -1, q, n)
        if "sink" not in given:
            seen = mask.any(-1).all(1)  # (batch or 1, q)
            rows = None if bool(seen.all()) else seen.expand(len(call.eta), q)
    if "log_weights" in given:
        w = given["log_weights"]
        support["log_weights"] = w.reshape((1,) * (4 - w.ndim) + w.shape).float().expand(-1, heads, q, n)
    if "sink" in given:
        sink = torch.as_tensor(given["sink"], dtype=torch.float32, device=call.eta.device)
        support["sink"] = sink.reshape(1, -1).expand(1, heads)
    return support, rows


def intersect_rows(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Queries that are in both; None: all."""
    if one is None or other is None:
        return other if one is None else one
    return one & other.to(one.device)
