"""A function with normal noise: its moments by a rule, its draws and its density.

z = g(x, t) + w,    w ~ N(0, V)        or  z = g(x, w, t)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log, pi
from typing import Any

import torch
from torch import Tensor

from cumulant.checks import sentence, shape
from cumulant.filters.batch_last import semidefinite_root
from cumulant.filters.linear_laws import regression
from cumulant.filters.moment_rules import MomentRule, PropagatedMoments, wrap
from cumulant.filters.parameters import covariance_problem

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
    continues z is the next x: its angles go on from those of x, beyond ±π if need be
    """

    name: str
    function: Map
    noise: Noise
    additive: bool
    rule: MomentRule
    angles: tuple[int, ...]
    size: int | None = None
    continues: bool = False

    def moments(self, mean: Tensor, covariance: Tensor, t: Any) -> PropagatedMoments:
        """From x ~ N(mean, covariance), (…, d) and (…, d, d)."""
        if mean.ndim == 1:
            alone = self.moments(mean[None], covariance[None], t)
            rest = alone.unexplained
            own = rest if rest is None or rest.ndim == 2 else rest[0]
            return PropagatedMoments(alone.mean[0], alone.covariance[0], alone.cross[0], own)
        moments = joint_moments([self], mean.unsqueeze(-3), covariance.unsqueeze(-4), t)
        mean, covariance, cross, rest = moments
        parts = mean.squeeze(-3), covariance.squeeze(-4), cross.squeeze(-4)
        return PropagatedMoments(*parts, None if rest is None else rest[0] if rest.ndim == 3 else rest.squeeze(-4))

    @property
    def group(self) -> tuple:
        """What maps must have in common to be taken through the rule together."""
        matrix = id(self.function) if isinstance(self.function, Tensor) else None
        return matrix, self.rule, self.additive, self.angles, self.size, self.continues

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
        if noise is not self.noise:  # the value of a function; constants were checked as the mode was made
            problem = covariance_problem(noise, definite=self.additive and not self.continues)
            if problem is not None:
                raise WrongResult(f"{self.name} noise", *problem)
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


def joint_moments(
    maps: Sequence[NoisyMap], mean: Tensor, covariance: Tensor, t: Any, noise: Tensor | None = None
) -> PropagatedMoments:
    """The moments of G maps of one `group` in one pass, (*older, G, sequences, d) → (*older, G, sequences, …).

    The unexplained part is (G, k, k) where it is the same for all sequences. ``noise`` is `constant_noise` of the maps.
    """
    first, lead, d = maps[0], mean.shape[:-1], mean.shape[-1]
    mean = mean.movedim(-1, 0).reshape(d, -1).mT  # views of memory in which the sequences are last
    covariance = covariance.movedim((-2, -1), (0, 1)).reshape(d, d, -1).movedim(-1, 0)
    noise = _stacked_noise(maps, t) if noise is None else noise
    if not first.additive:
        moments = _with_noise(maps, noise, mean, covariance, lead, t)
    elif isinstance(first.function, Tensor):
        moments = _linear(first.name, first.function, mean, covariance)
    else:
        size = noise.shape[-1] if first.size is None else first.size
        function = partial(_evaluate_all, maps, lead, t, size, None)
        moments = first.rule.transform(function, mean, covariance, first.angles, size)
    if first.continues and first.angles:
        moments = moments._replace(mean=mean + wrap((moments.mean - mean).mT, first.angles).mT)
    moments = _unflatten(moments, lead)
    return _plus(first.name, noise, moments) if first.additive else moments


def _evaluate_all(
    maps: Sequence[NoisyMap], lead: torch.Size, t: Any, size: int | None, state: int | None, z: Tensor
) -> Tensor:
    """Every function on its own vectors of (…, n, d), n split into (*older, G, sequences).

    With a size of the ``state``, z is (x, w).
    """
    rows_of_sequences = isinstance(t, Tensor) and t.ndim > 1 and lead.numel() > lead[-1]
    if all(each.function is maps[0].function for each in maps):
        if not rows_of_sequences:  # the axes do not matter to the function, and each view costs a node of its graph
            return maps[0].evaluate((z,) if state is None else (z[..., :state], z[..., state:]), t, size)
        split = z.unflatten(-2, lead)
        arguments = (split,) if state is None else (split[..., :state], split[..., state:])
        value = maps[0].evaluate(arguments, t, size)
    else:
        values = []
        for each, own in zip(maps, z.unflatten(-2, lead).unbind(-3), strict=True):
            values.append(each.evaluate((own,) if state is None else (own[..., :state], own[..., state:]), t, size))
        value = torch.stack(values, -3)
    return value.flatten(-1 - len(lead), -2)


def constant_noise(maps: Sequence[NoisyMap]) -> Tensor | None:
    """(G, k, k) where no covariance is a function and all have one size, None else."""
    noises = [each.noise for each in maps if isinstance(each.noise, Tensor)]
    alike = len(noises) == len(maps) > 0 and len({noise.shape for noise in noises}) == 1
    return torch.stack(noises) if alike else None


def _stacked_noise(maps: Sequence[NoisyMap], t: Any) -> Tensor:
    """(G, k, k), or (…, G, sequences, k, k) where a sequence has its own."""
    noises = [each.noise_at(t) for each in maps]
    if len({noise.shape[-1] for noise in noises}) > 1:
        got = ", ".join(map(shape, noises))
        raise WrongResult(f"{maps[0].name} noise", "one size in all modes", got, "Pad the smaller one.")
    if all(noise.ndim == 2 for noise in noises):
        return torch.stack(noises)
    rank = max(3, *(noise.ndim for noise in noises))
    full = [noise.reshape(*[1] * (rank - noise.ndim), *noise.shape) for noise in noises]
    return torch.stack(torch.broadcast_tensors(*full), -4)


def _linear(name: str, matrix: Tensor, mean: Tensor, covariance: Tensor) -> PropagatedMoments:
    """A matrix (k, d) on means (n, d) and covariances (n, d, d), with the batch last inside."""
    if matrix.shape[-1] != mean.shape[-1]:
        raise WrongResult(name, f"a matrix (…, d={mean.shape[-1]})", shape(matrix), "It acts on the state.")
    cross = torch.matmul(matrix, covariance.movedim(0, -1))  # (d, k, n)
    spread = torch.matmul(matrix, cross.transpose(0, 1))
    nothing = matrix.new_zeros(len(matrix), len(matrix))
    return PropagatedMoments((matrix @ mean.mT).mT, spread.movedim(-1, 0), cross.movedim(-1, 0), nothing)


def _unflatten(moments: PropagatedMoments, lead: torch.Size) -> PropagatedMoments:
    mean, covariance, cross, rest = moments
    mean, covariance, cross = (part.unflatten(0, lead) for part in (mean, covariance, cross))
    return PropagatedMoments(
        mean, covariance, cross, rest if rest is None or rest.ndim == 2 else rest.unflatten(0, lead)
    )


def _plus(name: str, noise: Tensor, moments: PropagatedMoments) -> PropagatedMoments:
    """Additive noise of every map, (G, k, k) or (…, G, sequences, k, k)."""
    k, own = moments.mean.shape[-1], moments.unexplained
    if noise.shape[-1] != k:
        expected, advice = f"a covariance (…, {k}, {k})", f"{name} has {k} entries."
        raise WrongResult(f"{name} noise", expected, shape(noise), advice)
    each = noise.unsqueeze(-3) if noise.ndim == 3 else noise
    if own is not None:
        own = own + (noise if own.ndim == 2 else each)
    return moments._replace(covariance=moments.covariance + each, unexplained=own)


def _with_noise(
    maps: Sequence[NoisyMap], noise: Tensor, mean: Tensor, covariance: Tensor, lead: torch.Size, t: Any
) -> PropagatedMoments:
    """The rule on (x, w) together; Cov(z | x) is what (x, w) leaves unexplained and what w explains."""
    (n, d), r, first = mean.shape, noise.shape[-1], maps[0]
    noise = _per_vector(noise, lead).expand(n, r, r)
    none = mean.new_zeros(n, d, r)
    both = torch.cat([torch.cat([covariance, none], -1), torch.cat([none.mT, noise], -1)], -2)
    function = partial(_evaluate_all, maps, lead, t, first.size, d)
    start = torch.cat([mean, mean.new_zeros(n, r)], -1)
    moments = first.rule.transform(function, start, both, first.angles, first.size)
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
    """One for each of the n vectors (*older, G, sequences), (n, k, k) with n last in memory; (1, k, k) of one map."""
    if noise.ndim == 3 and len(noise) == 1:
        return noise
    k = noise.shape[-1]
    whole = noise.unsqueeze(-3) if noise.ndim == 3 else noise
    return whole.expand(*lead, k, k).movedim((-2, -1), (0, 1)).reshape(k, k, -1).movedim(-1, 0)


def _tuple(sizes: Sequence[int | None]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"
