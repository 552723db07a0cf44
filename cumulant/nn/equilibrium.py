"""A block that returns the fixed point of a normalised layer, with the gradient of that point (S0-C4b, S3-R6).

    z = N(x + f(z)),      f(z) = Σ_h W_O,h attention_h(z) + W_2 relu(W_1 z + b_1) + b_2,      N LayerNorm with a gain

The solver may take as many steps as it likes: nothing of them is kept for the backward pass, which solves
(I − Jᵀ) g = v at the fixed point. Whether there is one, and only one, depends on weights and input. What came of it is
in ``block.last`` after every forward pass, and what happens where nothing did is the user's choice, not the block's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from cumulant.checks import everywhere, sentence
from cumulant.kernels import moments
from cumulant.kernels.arguments import Support
from cumulant.nn.blocks import SequenceBlock, split
from cumulant.nn.calls import is_observed, report_attention
from cumulant.solve import Anderson, Damped, Solution, Status, fixed_point
from cumulant.typing import Codes, Flags, PerQuery, Stepper

FALLBACKS = ("raise", "last", "unrolled")


class Settled(NamedTuple):
    """What the solver found in the last pass, one entry per sample (*batch).

    status    codes of `Status`
    steps     steps taken
    residual  |N(x + f(z)) − z| at the answer, or |v + Jᵀg − g| / |v| on the way back
    rate      geometric mean of the last few ratios of residuals: below 1 the iteration approached the answer
    """

    status: Codes
    steps: Codes
    residual: PerQuery
    rate: PerQuery

    @property
    def converged(self) -> Flags:
        return self.status == Status.CONVERGED


@final
class EquilibriumBlock(SequenceBlock):
    """z = N(x + f(z)), each sample solved until it converges.

    dim, heads  as in `SequenceBlock`; head_dim is dim / heads if None
    hidden      number of units of f, 4 dim if None; 0 leaves attention alone
    causal      attention looks back only, itself included, and so do the coefficients of Anderson's method. Later
                tokens only say when a sample is done: a token depends on them within the tolerance, and where the
                solver does not converge, not at all
    solver      `Anderson()` if None, or `Picard()`, `Damped(gate)`
    max_steps   of the solver
    tol         a sample is done when |N(x + f(z)) − z| ≤ tol (1 + |z|)
    fallback    what a sample that does not converge gets:
                "raise"     an ArithmeticError
                "last"      its best iterate (causal: its last, which needs no look at later tokens), with the gradient
                            of one application of the layer there; a warning
                "unrolled"  max_steps damped steps from N(x), differentiated through each of them; a warning
    gate        of those damped steps

    ``last`` has the status of the forward pass and ``backward_last`` that of solving (I − Jᵀ) g = v, once that has
    been done; where that does not converge its best iterate is used. A warning comes once per block for either.
    Gradients are of first order. Padding is seen by no token and returns N(x).

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> block, x = EquilibriumBlock(8, 2).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    >>> z = block(x)
    >>> bool((block.layer(z, x) - z).norm() < 1e-3), block.last.converged
    (True, tensor([True, True, True]))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int | None = None,
        hidden: int | None = None,
        *,
        causal: bool = False,
        solver: Stepper | None = None,
        max_steps: int = 30,
        tol: float = 1e-4,
        fallback: str = "last",
        gate: float = 0.5,
        eps: float = 1e-5,
    ):
        super().__init__(dim, heads, head_dim, causal)
        hidden = 4 * dim if hidden is None else self._count("hidden", hidden, 0)
        self.max_steps, self.tol = self._count("max_steps", max_steps), self._number("tol", tol)
        self.fallback = self._choice("fallback", fallback, FALLBACKS)
        self.solver, self.damped = Anderson() if solver is None else solver, Damped(gate)
        if not isinstance(self.solver, Stepper) or isinstance(solver, type):
            expected, advice = "Picard(), Damped(gate) or Anderson(memory)", "Pass an instance."
            raise TypeError(sentence(self._at("solver"), expected, repr(solver), advice))
        self.eps = self._number("eps", eps)
        width = (heads, self.head_dim, dim)
        self.query, self.key = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.value, self.output = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.up, self.up_bias = nn.Parameter(torch.empty(hidden, dim)), nn.Parameter(torch.zeros(hidden))
        self.down, self.down_bias = nn.Parameter(torch.empty(dim, hidden)), nn.Parameter(torch.zeros(dim))
        self.gain, self.shift = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.last: Settled | None = None
        self.backward_last: Settled | None = None
        self._warned: set[str] = set()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """f starts with slopes well below 1, so that the first fixed points exist and are reached."""
        for weight in (self.query, self.key, self.value, self.up):
            nn.init.normal_(weight, std=self.dim**-0.5)
        nn.init.normal_(self.output, std=0.3 * (self.heads * self.head_dim) ** -0.5)
        nn.init.normal_(self.down, std=0.3 * max(1, self.down.shape[-1]) ** -0.5)

    @property
    def guarantees(self) -> str:
        return (
            "a sample whose status is CONVERGED solves z = N(x + f(z)) to the tolerance and has the gradient of that "
            "fixed point; memory does not depend on the number of steps"
        )

    # ------------------------------------------------------------------ the layer

    def layer(self, z: Tensor, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """N(x + f(z)), once."""
        padding = self._padding(key_padding_mask, x)
        return self._layer(self._tokens("z", z), self._tokens("x", x), padding).reshape(x.shape)

    def _layer(self, z: Tensor, x: Tensor, padding: Tensor | None) -> Tensor:
        means = self._attend(z, padding)[-1]
        step = means.transpose(1, 2).flatten(2) @ self.output.flatten(0, 1)
        step = step + linear(torch.relu(linear(z, self.up, self.up_bias)), self.down, self.down_bias)
        step = step if padding is None else step.masked_fill(padding[..., None], 0)
        return layer_norm(x + step, (self.dim,), self.gain, self.shift, self.eps)

    def _attend(self, z: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        eta = self.head_dim**-0.5 * split(z, self.query)
        key, value = split(z, self.key), split(z, self.value)
        mean = moments(eta, key, value, statistics=("mean",), **self._support(padding).arguments()).mean
        return eta, key, value, mean

    def _support(self, padding: Tensor | None) -> Support:
        return Support(None if padding is None else ~padding[:, None, None, :], causal=self.causal)

    # ------------------------------------------------------------------ whether it contracts

    @torch.no_grad()
    def contraction_bound(self, x: Tensor) -> PerQuery:
        """λ with |N(x + f(a)) − N(x + f(b))| ≤ λ |a − b| in the norm max_i |z_i|, for all a and b that N can return.

            λ = max|γ| L_f / min_i √(σ_i² + ε),     σ_i = (σ(x_i) − F/√D)₊,     |z_i| ≤ R = max|γ| √D + |δ|
            L_f = Σ_h ‖O_hᵀV_h‖ (1 + 2 ‖Q_hᵀK_h‖ R²/√d) + ‖W_2‖ ‖W_1‖
            F   = Σ_h ‖O_hᵀV_h‖ R + ‖W_2‖ (‖W_1‖ R + |b_1|) + |b_2|  ≥ |f(z)_i|

        (*batch, n, dim) → (*batch). Below 1 there is one fixed point and no other, by Banach, whatever the mask. It is
        strict and seldom met by trained weights; `contraction_estimate` looks at the fixed point alone.
        """
        tokens, norm = self._tokens("x", x), torch.linalg.matrix_norm
        largest = self.gain.abs().max()
        radius = largest * self.dim**0.5 + self.shift.norm()
        through = norm(self.output.mT @ self.value, 2)  # (heads)
        score = norm(self.query.mT @ self.key, 2) * self.head_dim**-0.5
        up, down = (norm(w, 2) if w.numel() else w.new_zeros(()) for w in (self.up, self.down))
        slope = (through * (1 + 2 * score * radius.square())).sum() + down * up
        reach = through.sum() * radius + down * (up * radius + self.up_bias.norm()) + self.down_bias.norm()
        if not tokens.shape[1]:
            return x.new_zeros(x.shape[:-2])
        deviation = (tokens - tokens.mean(-1, keepdim=True)).norm(dim=-1) - reach
        least = (deviation.clamp_min(0).square() / self.dim + self.eps).sqrt().amin(-1)
        return (largest * slope / least).reshape(x.shape[:-2])

    def contraction_estimate(
        self, x: Tensor, key_padding_mask: Tensor | None = None, *, steps: int = 30, seed: int = 0
    ) -> PerQuery:
        """The spectral radius of the layer's Jacobian at the fixed point, approximately:  (*batch, n, dim) → (*batch)

            |(Jᵀ)^t v|^{1/t} from the second half of ``steps`` products with a seeded v

        Below 1 the plain iteration converges from near by, and no other fixed point is close.
        """
        with torch.no_grad():
            z = self(x, key_padding_mask)
        anchor = self._tokens("x", z).detach().requires_grad_()
        with torch.enable_grad():
            image = self._layer(anchor, self._tokens("x", x).detach(), self._padding(key_padding_mask, x))
        generator = torch.Generator(anchor.device).manual_seed(seed)
        v = torch.randn(anchor.shape, dtype=anchor.dtype, device=anchor.device, generator=generator)
        growth, half = anchor.new_zeros(len(anchor)), self._count("steps", steps) // 2
        for step in range(steps):
            size = v.flatten(1).norm(dim=1).clamp_min(torch.finfo(v.dtype).tiny)
            (v,) = torch.autograd.grad(image, anchor, v / size[:, None, None], retain_graph=True)
            if step >= half:
                growth = growth + v.flatten(1).norm(dim=1).log()
        return (growth / (steps - half)).exp().reshape(x.shape[:-2])

    # ------------------------------------------------------------------ its fixed point

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        tokens, padding = self._tokens("x", x), self._padding(key_padding_mask, x)
        if not x.numel():
            return x
        with torch.no_grad():
            start = layer_norm(tokens, (self.dim,), self.gain, self.shift, self.eps)
        solution = self._solve_forward(lambda z: self._layer(z, tokens, padding), start)
        self.last, self.backward_last = _solver_record(solution, x.shape[:-2]), None
        z = self._attach(solution, tokens, padding, x.shape[:-2])
        if not everywhere(solution.converged):
            z = self._fall_back(solution, z, tokens, padding)
        if is_observed(self):
            self._report(z, padding)
        return z.reshape(x.shape)

    def _solve_forward(self, fn: Callable[[Tensor], Tensor], start: Tensor) -> Solution:
        if not self.causal:
            return self._solve(fn, start, self.solver)
        ordered = replace(self.solver, width=self.dim) if isinstance(self.solver, Anderson) else self.solver
        with_proposal = _WithLastProposal(ordered)
        solution = self._solve(fn, start, with_proposal)
        if with_proposal.latest is None or everywhere(solution.converged):
            return solution
        latest = with_proposal.latest.reshape(start.shape)
        keep = solution.converged | ~latest.flatten(1).isfinite().all(1)
        value = torch.where(keep[:, None, None], solution.value, latest)
        residual = torch.where(keep, solution.residual, solution.trace[-1])
        return Solution(value, solution.status, solution.steps, residual, solution.trace)

    def _solve(self, fn: Callable[[Tensor], Tensor], start: Tensor, solver: Stepper) -> Solution:
        options = {"max_steps": self.max_steps, "tol": self.tol, "event_ndim": 2, "adjoint": "none"}
        return fixed_point(fn, start, solver=solver, **options)

    def _attach(self, solution: Solution, x: Tensor, padding: Tensor | None, lead: torch.Size) -> Tensor:
        """The answer with its gradient, g = v + Jᵀg where it converged and g = v, one application, where it did not.

        As `solve.implicit` has it, but with a status: what backward cannot solve is not passed over in silence.
        """
        if not torch.is_grad_enabled():
            return solution.value
        attached = self._layer(solution.value, x, padding)
        if not attached.requires_grad:
            return solution.value
        anchor = solution.value.detach().requires_grad_()
        image = self._layer(anchor, x, padding)
        settled = solution.converged[:, None, None]

        def backward(v: Tensor) -> Tensor:
            # the equation is linear: solved for unit vectors, its tolerance does not depend on the scale of the loss
            size = v.flatten(1).norm(dim=1)[:, None, None].clamp_min(torch.finfo(v.dtype).tiny)
            unit = v / size

            def onward(g: Tensor) -> Tensor:
                return unit + torch.autograd.grad(image, anchor, g * settled, retain_graph=True)[0]

            solution = self._solve(onward, unit, Anderson())
            self.backward_last = _solver_record(solution, lead)
            if not everywhere(solution.converged):
                self._warn_once(solution, "backward", "Their best iterate is used")
            return size * solution.value

        attached.register_hook(backward)
        return solution.value + attached - attached.detach()

    def _warn_once(self, solution: Solution, way: str, what: str) -> None:
        if way not in self._warned:
            advice = f"{what}; the status of every pass is in the block's record, this is said once."
            warnings.warn(self._unconverged_message(solution, way, advice), RuntimeWarning, stacklevel=6)
            self._warned.add(way)

    def _unconverged_message(self, solution: Solution, way: str, advice: str) -> str:
        lost = ~solution.converged
        worst = float(solution.residual[lost].max())
        got = f"{int(lost.sum())} of {len(lost)} samples without one, residual up to {worst:.2g}"
        return sentence(self._at(way), f"a fixed point within {self.max_steps} steps", got, advice)

    def _fall_back(self, solution: Solution, z: Tensor, x: Tensor, padding: Tensor | None) -> Tensor:
        if self.fallback == "raise":
            advice = 'Raise max_steps or tol, shrink the weights, or choose fallback="last" or "unrolled".'
            raise ArithmeticError(self._unconverged_message(solution, "forward", advice))
        if self.fallback == "last":
            self._warn_once(solution, "forward", f"Their {'last' if self.causal else 'best'} iterate is used")
            return z
        self._warn_once(solution, "forward", f"{self.max_steps} damped steps are used")
        lost = (~solution.converged).nonzero()[:, 0]
        lost_padding = None if padding is None else padding[lost]
        state = layer_norm(x[lost], (self.dim,), self.gain, self.shift, self.eps)
        for _ in range(self.max_steps):
            _, state = self.damped.step(None, state, self._layer(state, x[lost], lost_padding))
        return z.index_copy(0, lost, state)

    def _report(self, z: Tensor, padding: Tensor | None) -> None:
        """At the fixed point only, not at the iterates."""
        rows = None if padding is None else ~padding
        scale = self.head_dim**-0.5
        report_attention(self, *self._attend(z, padding), self._support(padding), scale=scale, rows=rows)


class _WithLastProposal:
    """A method that keeps its last proposal."""

    def __init__(self, method: Stepper):
        self.method = method
        self.latest: Tensor | None = None

    def init(self, x: Tensor) -> Any:
        return self.method.init(x)

    def step(self, state: Any, x: Tensor, fx: Tensor) -> tuple[Any, Tensor]:
        state, proposal = self.method.step(state, x, fx)
        self.latest = proposal
        return state, proposal


def _solver_record(solution: Solution, lead: torch.Size, last: int = 5) -> Settled:
    """The record, with the rate (r_t / r_{t−k})^{1/k} over the last k ≤ ``last`` steps of each sample."""
    first = (solution.steps - last).clamp_min(0)
    early, late = (solution.trace.gather(0, at[None])[0] for at in (first, solution.steps))
    ratio = torch.where(early > 0, late / early, 0) ** (1 / (solution.steps - first).clamp_min(1))
    rate = torch.where(ratio.isfinite(), ratio, torch.inf)
    return Settled(*(part.reshape(lead) for part in (solution.status, solution.steps, solution.residual, rate)))
