"""Expansion of a block, measured: its states are perturbed a little, and the differences followed along its stages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cumulant.observatory.hooks.residual_stages import BlockTrace
from cumulant.observatory.statistics.states import PassTokens, tally
from cumulant.observatory.statistics.tally import Tally

PERTURBATION_SIZE = 1e-3  # as a part of the state


def perturbation(x: Tensor, rows: Tensor, seed: int | list[int]) -> Tensor:
    """A random direction for each token of x (b, L, D), as long as a thousandth of it; 0 where rows (b, L) is False.

    seed  one for all, or one for each sequence, whose directions then do not depend on how it is padded
    """
    if isinstance(seed, int):
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    else:
        v = torch.ones(x.shape, dtype=x.dtype)
        for i, sequence_seed in enumerate(seed):
            tokens, generator = int(rows[i].sum()), torch.Generator().manual_seed(sequence_seed)
            v[i, rows[i]] = torch.randn(tokens, x.shape[-1], generator=generator, dtype=x.dtype)
    v = v.to(x.device)
    size = PERTURBATION_SIZE * torch.linalg.vector_norm(x, dim=-1) / torch.linalg.vector_norm(v, dim=-1)
    return torch.where(rows.to(x.device), size, 0)[..., None] * v


def growth_tallies(
    values: dict[str, Tensor],
    trace: BlockTrace,
    moved: dict[str, Tensor],
    moved_trace: BlockTrace,
    norms: dict[str, bool],
    tokens: PassTokens,
) -> Iterator[tuple[str, Tally]]:
    """Logarithms of how a perturbation grows from stage to stage and through each of ``norms``, per token.

    values, trace       states of all sequences of the pass, by stage, and the calls of the norms
    moved, moved_trace  the same of the sampled sequences, after a perturbation of the state that goes in
    """
    rows, position, index = tokens.rows, tokens.position[tokens.rows], tokens.sampled

    def length(after: Tensor, before: Tensor) -> Tensor:
        return torch.linalg.vector_norm((after - before[index.to(after.device)])[rows.to(after.device)], dim=-1)

    lengths = {stage: length(moved[stage], values[stage]) for stage in values if stage in moved}
    before = "in"
    for stage in list(lengths)[1:]:
        for quantity, base in (("growth", "in"), ("step", before)):
            yield f"{stage}/{quantity}", tally((lengths[stage] / lengths[base]).log(), position)
        before = stage
    again = {(call.norm, call.call_index): call for call in moved_trace.norms()}
    for call in trace.norms():
        other = again.get((call.norm, call.call_index))
        if other is not None and call.norm in norms:
            ratio = length(other.output, call.output) / length(other.input, call.input)
            yield f"norm {call.norm}/contraction", tally(ratio.log(), position)
