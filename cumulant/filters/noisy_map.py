"""A function with normal noise: its moments by a rule, its draws and its density.

z = g(x, t) + w,    w ~ N(0, V)        or  z = g(x, w, t)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, pi
from typing import Any

import torch
from torch import Tensor

from cumulant.checks import sentence, shape
from cumulant.filters.batch_last import semidefinite_root
from cumulant.filters.moment_rules import MomentRule, PropagatedMoments, wrap
from cumulant.filters.smoother import regression

Map = Tensor | Callable[..., Tensor]
Noise = Tensor | Callable[[Any], Tensor]


class WrongResult(ValueError):
    """What a function returned that it should not have; the engine adds mode and step."""

    def __init__(self, name: str, expected: str, got: str, advice: str):
        super().__init__(sentence(name, expected, got, advice))
        self.name, self.parts = name, (expected, got, advice)


@dataclass(frozen=True, eq=False)
class NoisyMap:
    """g with its noise; the argument t goes to both.

    function  g(x, t), g(x, w, t) where the noise is not ``additive``, or a matrix
    noise     V, or a function of t
    rule      how moments pass through g
    angles    entries of z that are angles
    size      of z where it is known before; None takes it from the noise or the result
    """

    name: str
    function: Map
    noise: Noise
    additive: bool
    rule: MomentRule
    angles: tuple[int, ...]
    size: int | None = None

    def moments(self, mean: Tensor, covariance: Tensor, t: Any) -> PropagatedMoments:
        """From x ~ N(mean, covariance), (…, d) and (…, d, d)."""
        noise, lead = self.noise_at(t), mean.shape[:-1]
        mean = mean.movedim(-1, 0).flatten(1).mT if len(lead) != 1 else mean
        covariance = covariance.movedim((-2, -1), (0, 1)).flatten(2).movedim(-1, 0) if len(lead) != 1 else covariance
        if not self.additive:
            moments = self._with_noise(noise, mean, covariance, lead, t)
        elif isinstance(self.function, Tensor):
            moments = self._plus(noise, self._linear(self.function, mean, covariance), lead)
        else:
            size = noise.shape[-1] if self.size is None else self.size

            def function(x: Tensor) -> Tensor:
                return self._evaluate_flat((x,), lead, t, size)

            moments = self._plus(noise, self.rule.transform(function, mean, covariance, self.angles), lead)
        return moments if len(lead) == 1 else _unflatten(moments, lead)

    def sample(self, x: Tensor, t: Any, generator: torch.Generator | None) -> Tensor:
        """A draw of z for each x (…, d)."""
        noise = self.noise_at(t)
        w = _draw(noise, x.shape[:-1], generator)
        if self.additive:
            return self.evaluate((x,), t, noise.shape[-1]) + w
        return self.evaluate((x, w), t, self.size)

    def noise_at(self, t: Any) -> Tensor:
        noise = self.noise if isinstance(self.noise, Tensor) else self.noise(t)
        if not isinstance(noise, Tensor) or noise.ndim < 2 or noise.shape[-1] != noise.shape[-2]:
            got = shape(noise) if isinstance(noise, Tensor) else type(noise).__name__
            raise WrongResult(f"{self.name} noise", "a square matrix (…, k, k)", got, "It is a covariance.")
        return noise

    def evaluate(self, arguments: tuple[Tensor, ...], t: Any, size: int | None) -> Tensor:
        """g(x, t) or g(x, w, t) with its shape checked: (…, size), leading axes those of x."""
        x = arguments[0]
        if isinstance(self.function, Tensor):
            return x @ self.function.mT
        value = self.function(*arguments, t)
        if not isinstance(value, Tensor):
            raise WrongResult(self.name, "a tensor", type(value).__name__, "Return torch.stack([...], -1).")
        wanted = (*x.shape[:-1], value.shape[-1] if size is None and value.ndim else size)
        if value.shape != wanted:
            expected = f"shape {_tuple(wanted)} from x of shape {shape(x)}"
            advice = "x has shape (…, d): use x[..., i] for its entries and torch.stack([...], -1) for the result."
            raise WrongResult(self.name, expected, shape(value), advice)
        if value.dtype != x.dtype:
            advice = "Constants in it need the dtype of the model."
            raise WrongResult(self.name, f"dtype {x.dtype}", str(value.dtype), advice)
        return value

    def _evaluate_flat(self, arguments: tuple[Tensor, ...], lead: torch.Size, t: Any, size: int | None) -> Tensor:
        """On vectors (…, n, d), the n split into the axes that the caller had, sequences last."""
        if len(lead) == 1:
            return self.evaluate(arguments, t, size)
        split = tuple(part.unflatten(-2, lead or (1,)) for part in arguments)
        return self.evaluate(split, t, size).flatten(-1 - max(len(lead), 1), -2)

    def _linear(self, matrix: Tensor, mean: Tensor, covariance: Tensor) -> PropagatedMoments:
        """A matrix (k, d) on means (n, d) and covariances (n, d, d), with the batch last inside."""
        if matrix.shape[-1] != mean.shape[-1]:
            expected = f"a matrix (…, d={mean.shape[-1]})"
            raise WrongResult(self.name, expected, shape(matrix), "It acts on the state.")
        cross = torch.matmul(matrix, covariance.movedim(0, -1))  # (d, k, n)
        spread = torch.matmul(matrix, cross.transpose(0, 1))
        nothing = matrix.new_zeros(len(matrix), len(matrix))
        image = (matrix @ mean.mT).mT
        return PropagatedMoments(image, spread.movedim(-1, 0), cross.movedim(-1, 0), nothing)

    def _plus(self, noise: Tensor, moments: PropagatedMoments, lead: torch.Size) -> PropagatedMoments:
        """Additive noise."""
        k = moments.mean.shape[-1]
        if noise.shape[-1] != k:
            expected, advice = f"a covariance (…, {k}, {k})", f"{self.name} has {k} entries."
            raise WrongResult(f"{self.name} noise", expected, shape(noise), advice)
        rest = _per_vector(noise, lead)
        own = None if moments.unexplained is None else moments.unexplained + rest
        return moments._replace(covariance=moments.covariance + rest, unexplained=own)

    def _with_noise(
        self, noise: Tensor, mean: Tensor, covariance: Tensor, lead: torch.Size, t: Any
    ) -> PropagatedMoments:
        """The rule on (x, w) together; Cov(z | x) is what (x, w) leaves unexplained and what w explains."""
        (n, d), r = mean.shape, noise.shape[-1]
        noise = _per_vector(noise, lead).expand(n, r, r)
        none = mean.new_zeros(n, d, r)
        both = torch.cat([torch.cat([covariance, none], -1), torch.cat([none.mT, noise], -1)], -2)

        def function(z: Tensor) -> Tensor:
            return self._evaluate_flat((z[..., :d], z[..., d:]), lead, t, self.size)

        moments = self.rule.transform(function, torch.cat([mean, mean.new_zeros(n, r)], -1), both, self.angles)
        cross, by_noise = moments.cross[:, :d], moments.cross[:, d:]
        rest = moments.unexplained
        if rest is not None:
            rest = rest + regression(by_noise, noise) @ by_noise
        return moments._replace(cross=cross, unexplained=rest)


def sample_normal(moments: PropagatedMoments, generator: torch.Generator | None) -> Tensor:
    """A draw for each of the laws (…, k)."""
    return moments.mean + _draw(moments.covariance, moments.mean.shape[:-1], generator)


def normal_log_density(
    y: Tensor, mean: Tensor, covariance: Tensor, observed: Tensor | None, angles: tuple[int, ...]
) -> Tensor:
    """log N(y; mean, covariance) over the entries that were observed, differences of angles wrapped.

    y, mean and observed (…, m), covariance (m, m) or (…, m, m).

    >>> import torch
    >>> normal_log_density(torch.zeros(1, 2), torch.ones(1, 2), torch.eye(2), torch.tensor([[True, False]]), ())
    tensor([-1.4189])
    """
    apart = wrap((y - mean).movedim(-1, 0), angles).movedim(0, -1)
    count = float(y.shape[-1])
    if observed is not None:
        both = observed[..., :, None] & observed[..., None, :]
        eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
        covariance, apart = torch.where(both, covariance, eye), torch.where(observed, apart, 0)
        count = observed.to(y.dtype).sum(-1)
    root = torch.linalg.cholesky(covariance)
    log_size = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    if root.ndim == 2:  # one triangular solve for all of them
        white = torch.linalg.solve_triangular(root, apart.reshape(-1, y.shape[-1]).mT, upper=False)
        distance = white.square().sum(0).reshape(apart.shape[:-1])
    else:
        distance = torch.linalg.solve_triangular(root, apart[..., None], upper=False).square().sum((-2, -1))
    return -(distance + log_size + count * log(2 * pi)) / 2


def _draw(covariance: Tensor, lead: torch.Size, generator: torch.Generator | None) -> Tensor:
    """N(0, covariance) for a covariance (k, k) or (…, k, k) that broadcasts to the leading axes."""
    k = covariance.shape[-1]
    root = semidefinite_root(covariance.movedim((-2, -1), (0, 1)).reshape(k, k, -1))  # (k, k, n)
    draw = torch.randn(*lead, k, dtype=covariance.dtype, device=covariance.device, generator=generator)
    if covariance.ndim == 2:
        return draw @ root[..., 0].mT
    roots = root.movedim(-1, 0).reshape(covariance.shape)
    return (roots @ draw[..., None])[..., 0]


def _per_vector(noise: Tensor, lead: torch.Size) -> Tensor:
    """(k, k), or one for each of the vectors (n, k, k)."""
    if noise.ndim == 2:
        return noise
    return noise.expand(*lead, *noise.shape[-2:]).reshape(-1, *noise.shape[-2:])


def _unflatten(moments: PropagatedMoments, lead: torch.Size) -> PropagatedMoments:
    mean, covariance, cross, rest = moments
    parts = (part.reshape(*lead, *part.shape[1:]) for part in (mean, covariance, cross))
    own = rest if rest is None or rest.ndim == 2 else rest.reshape(*lead, *rest.shape[1:])
    return PropagatedMoments(*parts, own)


def _tuple(sizes: Sequence[int | None]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"
