"""How much attention goes to each named part of a text, and from which part it comes.

    mass    Σ_{j in b} p_ij                           of a query i in part a, or in no part, to the keys of part b
    chance  (keys of b that i sees) / (keys that it sees)

Both are summed over the queries that see a key of b at all, and these are counted. What is kept is (heads, 1 + parts,
parts): from a, with queries of no part first, to b. Sums add over batches; those of other names are aligned by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from cumulant.kernels.profile import attention_profile
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.statistics.targets import ROWS, SequenceTokens, call_of_sequences, first_query

SUMS = ("parts/mass", "parts/even", "parts/count")  # even: the chance


@dataclass(frozen=True, eq=False)
class TokenParts:
    """Of a pass: parts (batch, n) of its tokens, as places among so many names, −1 for none."""

    parts: Tensor
    names: int
    _marks: dict[int, SequenceTokens] = field(default_factory=dict)

    def marks(self, part: int) -> SequenceTokens:
        """The keys of a part as marked ones: what queries see of them is kept for layers with the same mask."""
        if part not in self._marks:
            self._marks[part] = SequenceTokens(self.parts, None, torch.tensor([part], device=self.parts.device))
        return self._marks[part]


def part_sums(call: AttentionCall, tokens: TokenParts) -> dict[str, Tensor]:
    """The sums of one call of self-attention, by the names in `SUMS`; queries are the tokens that keys stand for.

    >>> from cumulant.nn import Support
    >>> x = torch.zeros(1, 1, 4, 2)                                  # four tokens that look alike: a prompt, an answer
    >>> call = AttentionCall(torch.nn.Identity(), x, x, x, Support(causal=True), x)
    >>> sums = part_sums(call, TokenParts(torch.tensor([[0, 0, 0, 1]]), 2))
    >>> (sums["parts/mass"] / sums["parts/count"])[0, 1:].tolist()   # from each to each; nothing is ahead
    [[1.0, nan], [0.75, 0.25]]
    """
    heads = call.eta.shape[1]
    shape = heads, 1 + tokens.names, tokens.names
    out = {name: torch.zeros(shape, dtype=torch.float64) for name in SUMS}
    source = torch.nn.functional.one_hot(tokens.parts + 1, 1 + tokens.names).double()  # (batch, q, 1 + names)
    for part in tokens.parts.unique().tolist():
        if part < 0:
            continue
        seen, marked = tokens.marks(part).visible(call)
        assert marked is not None
        mass = _mass(call, tokens.marks(part))
        counted = (marked > 0).expand_as(mass) & ~mass.isnan()
        values = (mass, marked / seen, torch.ones_like(mass))
        for name, value in zip(SUMS, values, strict=True):
            kept = torch.where(counted, value, 0).double()
            out[name][:, :, part] = torch.einsum("bhq,bqs->hs", kept, source).cpu()
    return out


def _mass(call: AttentionCall, tokens: SequenceTokens) -> Tensor:
    """(batch, heads, q) on marked keys, NaN where a query is padding or sees nothing."""
    batch, heads, q, _ = call.eta.shape
    marked = tokens.delimiter
    assert marked is not None
    mass = call.eta.new_empty(batch, heads, q)
    for index in torch.arange(batch).split(max(1, ROWS // max(1, heads * q))):
        some = slice(int(index[0]), int(index[-1]) + 1)
        own = call_of_sequences(call, some)
        support = replace(own.support, offset=first_query(own), sink=None)
        on_keys = marked[some][:, None].expand(-1, own.key.shape[1], -1)
        found = attention_profile(own.eta, own.key, **support.arguments(), marked=on_keys, statistics=())
        g, value = found.moments.log_normalizer, found.marked_mass
        assert value is not None
        if own.support.sink is not None:  # which takes its part
            sink = torch.as_tensor(own.support.sink, dtype=g.dtype, device=g.device)[..., None]
            value = value * torch.exp(g - torch.logaddexp(g, sink))
        blank = g == -torch.inf
        if own.rows is not None:
            blank = blank | ~own.rows[:, None, :]
        mass[some] = value.masked_fill(blank, torch.nan)
    return mass


def aligned(sums: dict[str, Tensor], names: tuple[str, ...], wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """Sums under the same keys, those of parts for ``wanted`` names, among which are all of ``names``."""
    if names == wanted:
        return sums
    to = torch.tensor([wanted.index(name) for name in names], dtype=torch.int64)
    out = {}
    for key, value in sums.items():
        if key.endswith(SUMS):
            whole = value.new_zeros(value.shape[0], 1 + len(wanted), len(wanted))
            rows = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + to])
            whole[:, rows[:, None], to] = value
            value = whole
        out[key] = value
    return out


def grown(value: Tensor, names: int) -> Tensor:
    """Sums (heads, 1 + parts, parts) with room for more names behind."""
    more = names - value.shape[2]
    return pad(value, (0, more, 0, more)) if more else value
