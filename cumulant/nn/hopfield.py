"""Hopfield memories as layers: states are drawn to the patterns they are near, each until it comes to rest (S1-H1..H4).

    ξ⁺ = ∇G_h(β_h ξ) = Σ_j softmax_j(β_h ⟨ξ,k_j⟩) k_j,      output = Σ_j softmax_j(β_h ⟨ξ*,k_j⟩) v_j

The names are those of the layers of Ramsauer et al.; the semantics are `cumulant.hopfield`'s. Patterns are what you
pass: projections are there only if asked for, nothing is normalised. β belongs to a head and stays positive. A state
stops when it has converged, whatever its batch mates do. A state that sees no pattern retrieves 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from cumulant import hopfield
from cumulant.checks import everywhere, holds, require_alike, require_float, sentence, shape
from cumulant.hopfield import Retrieval
from cumulant.kernels import moments
from cumulant.kernels.arguments import Support
from cumulant.nn.calls import is_observed, report_attention
from cumulant.nn.masks import as_log_weights, support_of_masks
from cumulant.nn.projected import check_sizes
from cumulant.solve import Status

PROJECTIONS = ("state", "stored", "value", "output")
FALLBACKS = ("last", "raise")


class Recall(NamedTuple):
    """What `Hopfield.retrieve` returns.

    output  as of `Hopfield.forward`
    heads   `Retrieval` with a head axis: where each state came to rest (batch, heads, q, d), its energies, steps and
            status
    """

    output: Tensor
    heads: Retrieval


class _HeadArguments(NamedTuple):
    """Arguments head by head, (batch | 1, heads, ·, ·), and log weights of the patterns."""

    state: Tensor
    patterns: Tensor
    values: Tensor | None
    log_weights: Tensor | None


@final
class Hopfield(nn.Module):
    """States (batch, q, dim) retrieve from stored patterns (batch, n, stored_size) that come with the call.

        E_h(ξ) = −β_h⁻¹ (G_h(β_h ξ) − log N) + ½|ξ|² + ½M²      never increases on the way to ξ*

    dim          width of the states
    num_heads    states and patterns are cut into so many parts, each a memory with its own β
    beta         inverse temperature, a number or one per head; 1/√(width of a head) if None
    learn_beta   through its logarithm, so that it stays positive; False: it is a buffer
    projections  among "state", "stored", "value", "output": linear maps before and after; none by default
    hidden_size  width of projected states and patterns, dim if None
    stored_size  width of stored patterns, dim if None; value_size likewise, stored_size if None
    steps        None: each state until it rests, with the gradient of its fixed point; a number: so many steps for
                 all, the last of which averages the values. 1 is attention.
    tol, max_steps, gate  as in `cumulant.hopfield.retrieve`
    fallback     what states that do not come to rest get: "last", their best iterate, with a warning once per layer; or
                 "raise", an ArithmeticError. ``last`` has the record of the last forward pass.

    >>> import torch
    >>> patterns = torch.eye(4)
    >>> memory = Hopfield(4, beta=8.0)
    >>> memory(torch.tensor([[0.9, 0.3, 0.0, -0.2]]), patterns).round(decimals=2)
    tensor([[1., 0., 0., 0.]], grad_fn=<RoundBackward1>)
    """

    guarantees = "a state whose status is CONVERGED is a fixed point of retrieval, and its energy never rose on the way"

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        *,
        beta: float | Sequence[float] | Tensor | None = None,
        learn_beta: bool = True,
        projections: Collection[str] = (),
        hidden_size: int | None = None,
        stored_size: int | None = None,
        value_size: int | None = None,
        bias: bool = True,
        steps: int | None = None,
        gate: float = 1.0,
        tol: float | None = None,
        max_steps: int = 200,
        fallback: str = "last",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.dim, self.num_heads = dim, num_heads
        self.hidden_size = dim if hidden_size is None else hidden_size
        self.stored_size = dim if stored_size is None else stored_size
        self.value_size = self.stored_size if value_size is None else value_size
        self.own_values = value_size is not None
        self.steps, self.gate, self.tol, self.max_steps = steps, gate, tol, max_steps
        self.fallback, self.projections = fallback, tuple(dict.fromkeys(projections))
        self._check_settings()
        factory = {"device": device, "dtype": dtype}
        inner = self.value_size if self.own_values and "value" not in self.projections else self.hidden_size
        sizes = {"state": dim, "stored": self.stored_size, "value": self.value_size, "output": inner}
        for name in self.projections:
            width = dim if name == "output" else self.hidden_size
            self.add_module(f"{name}_projection", nn.Linear(sizes[name], width, bias=bias, **factory))
        logs = self._log_beta(beta).to(device=device, dtype=torch.get_default_dtype() if dtype is None else dtype)
        if learn_beta:
            self.log_beta = nn.Parameter(logs)
        else:
            self.register_buffer("log_beta", logs)
        self.last: Retrieval | None = None
        self._warned = False

    @property
    def beta(self) -> Tensor:
        """(heads,)"""
        return self.log_beta.exp()

    def forward(
        self,
        state: Tensor,
        stored: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """What the states retrieve, (batch, q, dim) without projections.

        state             (batch, q, dim), or (q, dim) for one memory
        stored            (batch, n, stored_size); the states themselves if None
        value             (batch, n, value_size) averaged in the place of the patterns; with a "value" projection the
                          stored patterns if None
        key_padding_mask  (batch, n) and attn_mask (q, n) or (batch · heads, q, n): True is blocked, numbers are log
                          weights, as in torch.nn
        """
        return self.retrieve(state, stored, value, key_padding_mask=key_padding_mask, attn_mask=attn_mask).output

    def retrieve(
        self,
        state: Tensor,
        stored: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Recall:
        """`forward` with the record of every state; where ``steps`` is a number, of all steps but the last."""
        single = state.ndim == 2
        memory = self._memory(state, stored, value, key_padding_mask, attn_mask)
        steps = None if self.steps is None else self.steps - 1
        retrieval = hopfield.retrieve(
            memory.state,
            memory.patterns,
            beta=self.beta,
            steps=steps,
            gate=self.gate,
            log_weights=memory.log_weights,
            tol=self.tol,
            max_steps=self.max_steps,
        )
        self.last = Retrieval(*(part.detach() for part in retrieval))
        if steps is None:
            self._check_convergence(retrieval)
        output = self._average(memory, retrieval.state)
        out = self._projected("output", output.transpose(1, 2).flatten(-2))
        if not single:
            return Recall(out, retrieval)
        heads = Retrieval(
            retrieval.state[0], retrieval.energy[:, 0], retrieval.steps[0], retrieval.status[0], retrieval.residual[0]
        )
        return Recall(out[0], heads)

    def energy(
        self,
        state: Tensor,
        stored: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """E_h of the states as they come in, (batch, heads, q); ½|ξ|² for one that sees no pattern."""
        memory = self._memory(state, stored, None, key_padding_mask, attn_mask)
        energy = hopfield.energy(memory.state, memory.patterns, beta=self.beta, log_weights=memory.log_weights)
        return energy[0] if state.ndim == 2 else energy

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.num_heads}, steps={self.steps}"

    # ------------------------------------------------------------------ arguments

    def _memory(self, state, stored, value, key_padding_mask, attn_mask) -> _HeadArguments:
        stored = state if stored is None else stored
        value = stored if value is None and "value" in self.projections else value
        widths = {"state": self.dim, "stored": self.stored_size, "value": self.value_size}
        arguments: dict[str, Tensor] = {"state": state, "stored": stored} | ({} if value is None else {"value": value})
        for name, x in arguments.items():
            self._check(name, x, widths[name], state)
        if value is not None and value.shape[-2] != stored.shape[-2]:
            expected = f"one value for each of {stored.shape[-2]} patterns"
            raise ValueError(sentence("Hopfield.value", expected, shape(value), "Check the patterns' axis."))
        if key_padding_mask is not None and state.ndim == 2:
            key_padding_mask = key_padding_mask[None]
        rows = {name: x if x.ndim == 3 else x[None] for name, x in arguments.items()}
        query, key = rows["state"], rows["stored"]
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        support = support_of_masks("Hopfield", query, key.expand(len(query), -1, -1), heads=self.num_heads, **masks)
        cut = {name: self._split(name, x) for name, x in rows.items()}
        log_weights = as_log_weights(support, cut["stored"], query.shape[1])
        return _HeadArguments(cut["state"], cut["stored"], cut.get("value"), log_weights)

    def _split(self, name: str, x: Tensor) -> Tensor:
        """(batch, n, ·) → (batch, heads, n, ·)"""
        return self._projected(name, x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _projected(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, f"{name}_projection")(x) if name in self.projections else x

    def _average(self, memory: _HeadArguments, state: Tensor) -> Tensor:
        """The mean of the values as this state sees them, which for patterns as values is one more step."""
        eta = self.beta[:, None, None] * state
        values = memory.patterns if memory.values is None else memory.values
        w = memory.log_weights
        mean = moments(eta, memory.patterns, memory.values, log_weights=w, statistics=("mean",)).mean
        if is_observed(self):
            batch = (len(eta), -1, -1, -1)
            scale = float(self.beta.detach().mean())
            keys, support = memory.patterns.expand(batch), Support(log_weights=w)
            report_attention(self, eta, keys, values.expand(batch), mean, support, scale=scale)
        return mean

    def _check_convergence(self, retrieval: Retrieval) -> None:
        if torch.compiler.is_compiling():
            return
        resting = retrieval.status == Status.CONVERGED
        if everywhere(resting):
            return
        lost = int((~resting).sum())
        expected = f"states at rest within {self.max_steps} steps"
        got = f"{lost} of {retrieval.status.numel()} that are not, residual up to {float(retrieval.residual.max()):.2g}"
        advice = "Raise max_steps or tol, or set a number of steps; layer.last has the status of every state."
        if self.fallback == "raise":
            raise ArithmeticError(sentence("Hopfield.forward", expected, got, advice))
        if not self._warned:
            warnings.warn(sentence("Hopfield.forward", expected, got, advice), RuntimeWarning, stacklevel=4)
            self._warned = True

    # ------------------------------------------------------------------ checks

    def _check(self, name: str, x: Tensor, width: int, state: Tensor) -> None:
        where = f"Hopfield.{name}"
        require_alike(where, require_float(where, x), "the parameters", self.log_beta)
        if x.ndim not in (2, 3) or x.shape[-1] != width or x.ndim > state.ndim:
            expected = f"shape (batch, tokens, {width}) or (tokens, {width})"
            raise ValueError(sentence(where, expected, shape(x), "The last axis is the pattern."))
        if x.ndim == 3 and x.shape[0] not in (1, state.shape[0]):
            expected = f"the batch of state ({state.shape[0]})"
            raise ValueError(sentence(where, expected, x.shape[0], "Leave the batch axis out to share patterns."))

    def _check_settings(self) -> None:
        check_sizes("Hopfield", self.hidden_size, self.num_heads, name="hidden_size")
        for name in self.projections:
            if name not in PROJECTIONS:
                expected = f"names among {', '.join(PROJECTIONS)}"
                raise ValueError(sentence("Hopfield.projections", expected, repr(name), "Pick from them."))
        for name, size in {"state": self.dim, "stored": self.stored_size}.items():
            if name not in self.projections and size != self.hidden_size:
                expected = f"patterns as wide as hidden_size={self.hidden_size}"
                advice = f"Add {name!r} to projections."
                raise ValueError(sentence(f"Hopfield.{name}", expected, size, advice))
        if "value" not in self.projections and self.value_size % self.num_heads and self.own_values:
            expected = f"a multiple of num_heads={self.num_heads}"
            raise ValueError(sentence("Hopfield.value_size", expected, self.value_size, "Each head takes a part."))
        if self.fallback not in FALLBACKS:
            raise ValueError(sentence("Hopfield.fallback", "'last' or 'raise'", repr(self.fallback), "Pick one."))
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            advice = "1 is attention, None runs to rest."
            raise ValueError(sentence("Hopfield.steps", "a number of steps ≥ 1, or None", self.steps, advice))

    def _log_beta(self, beta: float | Sequence[float] | Tensor | None) -> Tensor:
        width = self.hidden_size // self.num_heads
        positive = torch.as_tensor(1 / math.sqrt(width) if beta is None else beta, dtype=torch.float64).detach()
        if positive.shape not in ((), (self.num_heads,)) or not holds((positive > 0) & positive.isfinite()):
            expected = f"a positive number, or one for each of {self.num_heads} heads"
            got = beta if positive.ndim < 2 else shape(positive)
            raise ValueError(sentence("Hopfield.beta", expected, got, "It is an inverse temperature."))
        return positive.log().expand(self.num_heads).clone()
