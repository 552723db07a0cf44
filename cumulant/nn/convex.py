"""A block that is one ascent step on a convex potential, and can be undone exactly (X-1, X-2, X-12, X-13, X-14).

    y = x + ∇Φ(x | context),      Φ = Σ_h c_h G_h(W_h x) + Ψ(W x + b) + ⟨a,x⟩
    G_h(η) = log Σ_j e^⟨k_hj,η⟩,   k_hj = V_h norm(context_j) and, if there is a memory, learned atoms
    ∇Φ  = Σ_h c_h W_hᵀ attention_h(W_h x) + Wᵀ ψ(Wx + b) + a

The matrix that reads a token is the transpose of the one that writes it, which ties values and output to queries and
keys. Given the context, Φ is convex in x: the Jacobian I + ∇²Φ has no eigenvalue below 1, no two tokens that look at
one context come closer, and x = prox_Φ(y). No norm stands between x and Φ; one on the context costs nothing, for the
context stands still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from cumulant.checks import broadcast, require_finite, sentence, shape
from cumulant.kernels import Moments, moments
from cumulant.kernels.arguments import Support
from cumulant.measures import Empirical
from cumulant.nn.blocks import SequenceBlock, join, split, strict_past_moments
from cumulant.nn.calls import is_observed, report_attention
from cumulant.potentials import Block, Potential, ReluSquare, Units
from cumulant.solve import Solution, newton
from cumulant.typing import Matrices, PerQuery, Queries

UNITS = {"softplus": Units, "relu": ReluSquare}


@final
@dataclass(frozen=True, eq=False)
class MultiheadPotential(Potential):
    """MultiheadPotential with gains on one stream: Φ(x) = Σ_h c_h G_h(W_h x), convex for c_h > 0 (X-12).

    weight   (heads, d, D)
    gain     (heads), positive
    atoms    (b, heads, n, d)
    visible  (b, n) Boolean, False where an atom is absent; None: all are there
    offset   None: every query sees every atom; a number: query i sees atoms j ≤ offset + i

    A head that sees no atom adds 0. With equal gains of 1 this is `potentials.multihead` of `Empirical` measures.

    >>> import torch
    >>> heads = MultiheadPotential(torch.eye(2)[None], torch.ones(1), torch.eye(2)[None, None])
    >>> heads.gradient(torch.zeros(1, 1, 2))
    tensor([[[0.5000, 0.5000]]])
    """

    weight: Tensor
    gain: Tensor
    atoms: Tensor
    visible: Tensor | None = None
    offset: int | None = None

    @property
    def dim(self) -> int:
        return self.weight.shape[-1]

    @property
    def support(self) -> Support:
        """The atoms that a token sees."""
        mask = None if self.visible is None or not self.atoms.shape[-2] else self.visible[:, None, None, :]
        return Support(mask, causal=self.offset is not None, offset=self.offset)

    def head_moments(self, eta: Queries, *statistics: str) -> Moments:
        """What the heads see of tokens (b, q, D)."""
        if self.offset == -1:
            return strict_past_moments(split(eta, self.weight), self.atoms, statistics, self.support.mask)
        return moments(split(eta, self.weight), self.atoms, statistics=statistics, **self.support.arguments())

    def value(self, eta: Queries) -> PerQuery:
        g = self.head_moments(eta).log_normalizer
        return (self.gain[:, None] * torch.where(g == -torch.inf, 0, g)).sum(-2)

    def gradient(self, eta: Queries) -> Queries:
        return self.project(self.head_moments(eta, "mean"))

    def project(self, heads: Moments) -> Queries:
        """Σ_h c_h W_hᵀ m_h from the means of the heads."""
        return join(self.gain[:, None, None] * heads.mean, self.weight)

    def hessian(self, eta: Queries) -> Matrices:
        log_weights = self.support.weigh(eta.new_zeros(*self.atoms.shape[:2], eta.shape[-2], self.atoms.shape[-2]))
        fisher = Empirical(self.atoms, log_weights).fisher(split(eta, self.weight))  # (b, heads, q, d, d)
        w = self.weight[:, None]
        return (self.gain[:, None, None, None] * (w.mT @ fisher @ w)).sum(-4)


@final
class ConvexBlock(SequenceBlock):
    """x + ∇Φ(x | context), where the context is the tokens themselves unless another is passed.

    dim, heads    as in `SequenceBlock`; head_dim is dim / heads if None
    hidden        number of units, 4 dim if None; 0 leaves the heads alone
    causal        a token sees the tokens strictly before it, so that the block as a whole has an inverse too
    memory        number of learned atoms that every head sees beside the context
    units         "softplus": Ψ = Σ softplus, sigmoid units; "relu": Ψ = ½ Σ relu², ReLU units
    norm_context  whether keys read LayerNorm(context) or the context

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> block, x = ConvexBlock(8, 2).double(), torch.randn(1, 5, 8, dtype=torch.float64)
    >>> found = block.inverse(block(x), context=x)
    >>> bool((found.value - x).abs().max() < 1e-9), found.names()[0]
    (True, 'CONVERGED')
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int | None = None,
        hidden: int | None = None,
        *,
        causal: bool = False,
        memory: int | None = None,
        units: str = "softplus",
        norm_context: bool = True,
    ):
        super().__init__(dim, heads, head_dim, causal)
        hidden = 4 * dim if hidden is None else self._count("hidden", hidden, 0)
        memory = 0 if memory is None else self._count("memory", memory, 0)
        self.units = self._choice("units", units, tuple(UNITS))
        self.norm_context = bool(norm_context)
        self.query = nn.Parameter(torch.empty(heads, self.head_dim, dim))
        self.key = nn.Parameter(torch.empty(heads, self.head_dim, dim))
        self.log_gain = nn.Parameter(torch.zeros(heads))
        self.memory = nn.Parameter(torch.empty(heads, memory, self.head_dim))
        self.unit_weight = nn.Parameter(torch.empty(hidden, dim))
        self.unit_bias = nn.Parameter(torch.zeros(hidden))
        self.drift = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.query, std=(self.dim * self.head_dim) ** -0.5)
        nn.init.normal_(self.key, std=self.dim**-0.5)
        nn.init.normal_(self.memory)
        nn.init.normal_(self.unit_weight, std=self.dim**-0.5)
        with torch.no_grad():  # sigmoid units rest at ½: the drift takes that back
            nn.init.zeros_(self.drift)
            if self.units == "softplus":
                self.drift -= self.unit_weight.sum(0) / 2

    @property
    def guarantees(self) -> str:
        whole = ", and the whole block is undone from left to right" if self.causal else ""
        return (
            "given its context a token takes one ascent step on a convex potential: every eigenvalue of the Jacobian "
            f"is at least 1 and inverse(y, context) undoes it{whole}"
        )

    # ------------------------------------------------------------------ the potential

    def _heads(self, context: Tensor, visible: Tensor | None, offset: int | None) -> MultiheadPotential:
        """The heads over a context (b, n, D), learned atoms first."""
        keys = split(layer_norm(context, (self.dim,)) if self.norm_context else context, self.key)
        size = self.memory.shape[-2]
        if size:
            keys = torch.cat([self.memory.expand(keys.shape[0], -1, -1, -1), keys], -2)
            visible = None if visible is None else torch.nn.functional.pad(visible, (size, 0), value=True)
        return MultiheadPotential(
            self.query, self.log_gain.exp(), keys, visible, None if offset is None else offset + size
        )

    def _rest(self) -> tuple[Empirical, Units | ReluSquare]:
        """Drift, a point mass, and units."""
        return Empirical(self.drift[None]), UNITS[self.units](self.unit_weight, self.unit_bias)

    def _potential(self, x: Tensor, context: Tensor | None, key_padding_mask: Tensor | None) -> Block:
        return Block((self._context_heads(x, context, key_padding_mask), *self._rest()))

    def _context_heads(self, x: Tensor, context: Tensor | None, key_padding_mask: Tensor | None) -> MultiheadPotential:
        source = x if context is None else context
        tokens, padding = self._tokens("context", source), self._padding(key_padding_mask, source)
        broadcast(self._at("context"), x.shape[:-2], source.shape[:-2])
        if x.shape[:-2] != source.shape[:-2] or (self.causal and x.shape[-2] != source.shape[-2]):
            expected, got = f"the batch axes of x {shape(x)}, and its tokens if causal", shape(source)
            raise ValueError(sentence(self._at("context"), expected, got, "Expand it first."))
        return self._heads(tokens, None if padding is None else ~padding, -1 if self.causal else None)

    def potential(
        self, x: Queries, key_padding_mask: Tensor | None = None, *, context: Queries | None = None
    ) -> PerQuery:
        """Φ(x | context) of every token, (*batch, q); arguments as in `forward`."""
        return self._potential(x, context, key_padding_mask).value(self._tokens("x", x)).reshape(x.shape[:-1])

    def hessian(
        self, x: Queries, key_padding_mask: Tensor | None = None, *, context: Queries | None = None
    ) -> Matrices:
        """∇²Φ of every token at its context, (*batch, q, dim, dim); the Jacobian is I + ∇²Φ."""
        hessian = self._potential(x, context, key_padding_mask).hessian(self._tokens("x", x))
        return hessian.reshape(*x.shape, self.dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, *, context: Tensor | None = None) -> Tensor:
        """x (*batch, q, dim) one step up the potential of its context.

        context           (*batch, n, dim), seen by every token; x itself if None
        key_padding_mask  (*batch, n) over the context, True = padding, which no token sees
        """
        tokens, heads = self._tokens("x", x), self._context_heads(x, context, key_padding_mask)
        if not x.numel():
            return x
        head_moments = heads.head_moments(tokens, "mean")
        self._report(tokens, heads, head_moments)
        step = heads.project(head_moments) + Block(self._rest()).gradient(tokens)
        return x + step.reshape(x.shape)

    def _report(self, tokens: Tensor, heads: MultiheadPotential, head_moments: Moments) -> None:
        if is_observed(self):
            eta = split(tokens, self.query)
            report_attention(self, eta, heads.atoms, heads.atoms, head_moments.mean, heads.support)

    # ------------------------------------------------------------------ the inverse

    def inverse(
        self,
        y: Queries,
        key_padding_mask: Tensor | None = None,
        *,
        context: Queries | None = None,
        max_steps: int = 100,
    ) -> Solution:
        """x with forward(x, context=context) = y, the proximal map of Φ at y (X-2), one status per token.

            x = argmin Φ(x | context) + ½|x − y|²

        Without a context a causal block is undone from left to right, each token given those before it. For any other
        the context is what has been lost. Not differentiable.
        """
        tokens = self._tokens("y", y)
        require_finite(self._at("y"), tokens)
        with torch.no_grad():
            if context is not None:
                solution = _undo(self._potential(y, context, key_padding_mask), tokens, max_steps)
            elif self.causal:
                solution = self._left_to_right(tokens, self._padding(key_padding_mask, y), max_steps)
            else:
                advice = "Keep the block's input, or use causal=True."
                raise ValueError(sentence(self._at("context"), "the tokens that were seen", None, advice))
        lead = y.shape[:-1]
        status, steps, residual = (part.reshape(lead) for part in (solution.status, solution.steps, solution.residual))
        trace = solution.trace.reshape(len(solution.trace), *lead)
        return Solution(solution.value.reshape(y.shape), status, steps, residual, trace)

    def _left_to_right(self, y: Tensor, padding: Tensor | None, max_steps: int) -> Solution:
        x, solutions = y[:, :0], []
        for i in range(y.shape[1]):
            visible = None if padding is None else ~padding[:, :i]
            potential = Block((self._heads(x, visible, None), *self._rest()))
            solutions.append(_undo(potential, y[:, i : i + 1], max_steps))
            x = torch.cat([x, solutions[-1].value], 1)
        if not solutions:
            none = y.new_zeros(y.shape[:2])
            return Solution(y, none.to(torch.int8), none.long(), none, none[None])
        depth = max(part.trace.shape[0] for part in solutions)
        status, steps, residual = (
            torch.cat([getattr(part, name) for part in solutions], 1) for name in ("status", "steps", "residual")
        )
        traces = [torch.cat([p.trace, p.trace[-1:].expand(depth - p.trace.shape[0], -1, -1)]) for p in solutions]
        return Solution(x, status, steps, residual, torch.cat(traces, -1))


def _undo(potential: Block, y: Tensor, max_steps: int) -> Solution:
    """prox of a potential, which need not be the log-normalizer of a measure."""
    eye = torch.eye(potential.dim, dtype=y.dtype, device=y.device)
    return newton(
        lambda x: potential.value(x) + (x - y).square().sum(-1) / 2,
        lambda x: potential.gradient(x) + x - y,
        lambda x: potential.hessian(x) + eye,
        y,
        tol=64 * torch.finfo(y.dtype).eps * (1 + torch.linalg.vector_norm(y, dim=-1)),
        max_steps=max_steps,
    )
