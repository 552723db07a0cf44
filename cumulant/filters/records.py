"""Result records of filters, and how they are built from the beliefs of the engine."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cumulant.display import html_table, one_line
from cumulant.filters.protocol import Belief, Propagator
from cumulant.kernels.native import normals

LARGE_PAGE = 1 << 21  # bytes of one, and where it may begin
LARGE_FROM = 1 << 22
DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


class Filtered(NamedTuple):
    """Filtered laws of state and mode after each step; d is the size of the state, M the number of modes.

    prior_mean              (*batch, T, d)         E[x_t | y_1 … y_{t−1}]
    prior_covariance        (*batch, T, d, d)
    mean                    (*batch, T, d)         E[x_t | y_1 … y_t]
    covariance              (*batch, T, d, d)
    mode_means              (*batch, T, M, d)      the same given s_t
    mode_covariances        (*batch, T, M, d, d)
    mode_probabilities      (*batch, T, M)         P(s_t | y_1 … y_t)
    log_likelihood          (*batch, T)            log p(y_t | y_1 … y_{t−1}), 0 where nothing was observed
    mode_log_probabilities  (*batch, T, M)         logarithms, meaningful where the probabilities underflow
    beliefs                 a record of (*batch, T, M, …): the belief given each mode in the parameters of its family;
                            None for linear-Gaussian models, which mode_means and mode_covariances determine

    Mean and covariance of an impossible mode are finite and without meaning.
    """

    prior_mean: Tensor
    prior_covariance: Tensor
    mean: Tensor
    covariance: Tensor
    mode_means: Tensor
    mode_covariances: Tensor
    mode_probabilities: Tensor
    log_likelihood: Tensor
    mode_log_probabilities: Tensor
    beliefs: Any = None

    def __repr__(self) -> str:
        *batch, steps, modes, d = self.mode_means.shape
        sizes = {"batch": tuple(batch), "T": steps, "M": modes, "d": d}
        return one_line("Filtered", {**sizes, "log_likelihood": self.log_likelihood})

    def _repr_html_(self) -> str:
        shown = {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}
        return html_table("Filtered: laws of state and mode after each step", shown)

    @property
    def total_log_likelihood(self) -> Tensor:
        """log p(y_1 … y_T), (*batch)."""
        return self.log_likelihood.sum(-1)


class StepRecord(NamedTuple):
    """One step of a `Filtered`: the same fields without the time axis."""

    prior_mean: Tensor
    prior_covariance: Tensor
    mean: Tensor
    covariance: Tensor
    mode_means: Tensor
    mode_covariances: Tensor
    mode_probabilities: Tensor
    log_likelihood: Tensor
    mode_log_probabilities: Tensor
    beliefs: Any = None


class Hypotheses(NamedTuple):
    """log_weights (*hypotheses, batch) and the belief of each hypothesis."""

    log_weights: Tensor
    belief: Belief


class StepBeliefs(NamedTuple):
    """The beliefs of a step by the newest mode, before and after the observation, and log p(y) (batch)."""

    prior: Hypotheses
    posterior: Hypotheses
    log_likelihood: Tensor


class Normalized(NamedTuple):
    """log Σ exp along the first axis, and the terms divided by that sum."""

    log_total: Tensor
    weights: Tensor


def normalize(log_weights: Tensor) -> Normalized:
    """log Σ exp along the first axis and softmax of finite entries; torch.logsumexp checks for infinities first, which
    takes longer."""
    done = normals.normalize(log_weights)
    if done is not None:
        return Normalized(*done)
    top = log_weights.detach().amax(0, keepdim=True)
    terms = torch.exp(log_weights - top)
    total = terms.sum(0, keepdim=True)
    return Normalized((total.log() + top).squeeze(0), terms / total)


def to_filtered(propagator: Propagator, steps: list[StepBeliefs], batch: int) -> Filtered:
    """The beliefs of consecutive steps as records shaped (T, …, batch)."""
    prior, posterior = _stack([t.prior for t in steps], batch), _stack([t.posterior for t in steps], batch)
    weights = posterior.log_weights.exp()
    expected = prior.log_weights.exp()  # sums to 1 but for the rounding of the transition
    expected = expected / expected.sum(1, keepdim=True)
    before = propagator.moments(propagator.collapse(expected, prior.belief, 1))
    after = propagator.moments(propagator.collapse(weights, posterior.belief, 1))
    by_mode = propagator.moments(posterior.belief)
    evidence = torch.stack([t.log_likelihood.expand(batch) for t in steps])
    beliefs = propagator.record(posterior.belief)
    return Filtered(*before, *after, *by_mode, weights, evidence, posterior.log_weights, beliefs)


class RecordBuffer:
    """Records of consecutive segments (T, …, batch), joined into records (*batch, T, …).

    Where no derivative is ``tracked`` they are written into arrays made at the first one: memory is touched once.
    """

    def __init__(self, steps: int, batch_shape: torch.Size, *, tracked: bool):
        self.steps, self.batch_shape, self.tracked = steps, batch_shape, tracked
        self.written, self.segments = 0, []
        self.arrays: list[Tensor] | None = None

    def append(self, part: Filtered) -> None:
        leaves = [*part[:-1], *(part.beliefs or ())]
        self.like = part
        if self.tracked:
            self.segments.append(leaves)
            return
        if self.arrays is None:
            with torch.inference_mode(False):  # what is returned may meet a gradient later
                self.arrays = [_allocate(leaf, self.steps) for leaf in leaves]
        last = self.written + leaves[0].shape[0]
        for array, leaf in zip(self.arrays, leaves, strict=True):
            array[self.written : last] = leaf
        self.written = last

    def join(self) -> Filtered:
        arrays = self.arrays or [torch.cat(column) for column in zip(*self.segments, strict=True)]
        fields = [a.movedim(-1, 0).reshape(*self.batch_shape, *a.shape[:-1]) for a in arrays]
        count = len(Filtered._fields) - 1
        beliefs = None if self.like.beliefs is None else type(self.like.beliefs)(*fields[count:])
        return Filtered(*fields[:count], beliefs=beliefs)


def _allocate(leaf: Tensor, steps: int) -> Tensor:
    """Memory for all steps, of the CPU in large pages: there are hundreds of times fewer to be had at the first access.

    NumPy asks for large pages from LARGE_FROM bytes on; what is not touched of them costs nothing.
    """
    shape = (steps, *leaf.shape[1:])
    count, size = prod(shape), leaf.element_size()
    if leaf.device.type != "cpu" or leaf.dtype not in DTYPES or count * size < LARGE_PAGE // 2:
        return leaf.new_empty(shape)
    raw = np.empty(max(count * size + LARGE_PAGE, LARGE_FROM), dtype=np.uint8)
    begin = -raw.ctypes.data % LARGE_PAGE
    return torch.from_numpy(raw[begin : begin + count * size].view(DTYPES[leaf.dtype])).reshape(shape)


def _stack(hypotheses: list[Hypotheses], batch: int) -> Hypotheses:
    """A leading time axis, and full mode and batch axes on everything."""
    modes = hypotheses[0].log_weights.shape[0]

    def stacked(*steps: Tensor) -> Tensor:
        shape = (modes, *steps[0].shape[1:-1], batch)
        full = [leaf if leaf.shape == shape else leaf.expand(shape) for leaf in steps]
        return torch.stack(full) if len(full) > 1 else full[0].unsqueeze(0)

    leaves = zip(*(h.belief for h in hypotheses), strict=True)
    belief = type(hypotheses[0].belief)(*(stacked(*leaf) for leaf in leaves))
    return Hypotheses(stacked(*(h.log_weights for h in hypotheses)), belief)
