"""Heads of attention through the switching engine against attention; Sinkhorn attention against its iteration."""

import numpy as np
import pytest
import torch

from cumulant import attend, attention
from cumulant.filters import SwitchingLinearGaussian, gpb, heads, imm
from cumulant.filters.heads import Head, attention_as_filter, implied_source, sinkhorn_attention
from cumulant.solve import Status
from tests.compare import close


def t(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def head(q, n, d=4, e=3, batch=(), seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    return tuple(t(size * rng.normal(size=(*batch, *shape))) for shape in ((q, d), (n, d), (n, e)))


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


SIZES = [
    (1, 1, 1, ()),
    (1, 6, 2, ()),
    (6, 1, 2, ()),
    (5, 5, 4, ()),
    (7, 9, 3, (2, 3)),
    (20, 30, 10, ()),
    (64, 64, 4, (2,)),
    (256, 256, 4, ()),
]


@pytest.mark.parametrize(("q", "n", "e", "batch"), SIZES)
def test_a_head_is_a_step_of_the_filter(q, n, e, batch):
    query, key, value = head(q, n, e=e, batch=batch, size=2)
    found, expected = attention_as_filter(query, key, value), attend(query, key, value)
    close(found.output, attention(query, key, value))
    close(found.collapse_loss, expected.collapse_loss)
    assert found.output.shape == (*batch, q, e)
    assert found.covariance.shape == (*batch, q, e, e)
    assert found.transition.shape == (*batch, n, q)
    close(found.transition.sum(-1), torch.ones(*batch, n).double())
    close(found.source_marginal.sum(-1), torch.ones(batch).double())


def test_every_field_in_numpy():
    query, key, value = head(4, 5)
    prior = np.random.default_rng(1).dirichlet(np.ones(4))
    found = attention_as_filter(query, key, value, scale=0.7, query_weights=t(prior))
    weights = softmax(0.7 * query.numpy() @ key.numpy().T)
    sigma = weights.T @ prior
    close(found.weights, weights)
    close(found.source_marginal, sigma)
    close(found.transition, weights.T * prior / sigma[:, None])
    close(found.output, weights @ value.numpy())
    for j in range(4):
        around = value.numpy() - weights[j] @ value.numpy()
        close(found.covariance[j], (weights[j][:, None] * around).T @ around)
        close(found.collapse_loss[j], weights[j] @ (around**2).sum(1))
    # the transition carries σ to π′, and Bayes' rule takes it back to the weights
    close(found.source_marginal @ found.transition, prior)
    close((found.source_marginal[:, None] * found.transition / t(prior)).mT, weights)


def test_the_weights_of_the_queries_do_not_matter_to_the_output():
    query, key, value = head(5, 5)
    prior = t(np.random.default_rng(2).dirichlet(np.ones(5)))
    even, uneven = attention_as_filter(query, key, value), attention_as_filter(query, key, value, query_weights=prior)
    close(even.output, uneven.output)
    close(even.covariance, uneven.covariance)
    assert (even.source_marginal - uneven.source_marginal).abs().max() > 0.01


@pytest.mark.parametrize("filter", [imm, gpb], ids=["imm", "gpb2"])
def test_the_model_of_a_tracker_does_the_same(filter):
    """No slot of its own: the switching linear-Gaussian model, tokens as modes, one step with nothing seen."""
    query, key, value = head(5, 5)
    found = attention_as_filter(query, key, value)
    eye = torch.eye(3, dtype=torch.float64)
    model = SwitchingLinearGaussian(
        found.transition,
        eye,
        0 * eye,
        eye[:1],
        eye[:1, :1],
        initial_mean=value,
        initial_covariance=0 * eye,
        initial_modes=found.source_marginal,
        start="belief",
    )
    seen = filter(model, t([[np.nan]]))
    close(seen.mode_means[0], attention(query, key, value))
    close(seen.mode_covariances[0].diagonal(dim1=-2, dim2=-1).sum(-1), attend(query, key, value).collapse_loss)
    close(seen.mode_probabilities[0], np.full((5,), 0.2))
    own = filter(Head(found.source_marginal[None], found.transition[None], value[None]), torch.zeros(1, 1, 0).double())
    close(own.mode_means[0, 0], found.output)
    close(own.mode_covariances[0, 0], found.covariance)


def test_masks_biases_and_causality():
    query, key, value = head(6, 6, size=1.5)
    rng = np.random.default_rng(3)
    mask = torch.from_numpy(rng.random((6, 6)) > 0.4)
    mask[:, 0] = True
    bias = t(rng.normal(size=(6, 6)))
    for options in ({"causal": True}, {"mask": mask}, {"log_weights": bias}, {"log_weights": bias[0], "mask": mask}):
        found, expected = attention_as_filter(query, key, value, **options), attend(query, key, value, **options)
        close(found.output, expected.output)
        close(found.collapse_loss, expected.collapse_loss)
        marginal = attend(query, key, value, source_marginal=True, **options).source_marginal
        close(found.source_marginal, marginal)


def test_keys_nobody_attends_to_and_queries_that_see_nothing():
    query, key, value = head(4, 5)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[:, 2] = mask[1] = False
    prior = t([0.1, 0.2, 0.3, 0.4])
    found, expected = (
        attention_as_filter(query, key, value, mask=mask, query_weights=prior),
        attend(query, key, value, mask=mask),
    )
    assert found.source_marginal[2] == 0
    close(found.transition[2], prior)
    close(found.transition.sum(-1), torch.ones(5).double())
    close(found.output, expected.output)
    close(found.collapse_loss, expected.collapse_loss)
    assert (found.output[1] == 0).all()
    assert found.collapse_loss[1] == 0
    blind = attention_as_filter(query, key, value, mask=torch.zeros(4, 5, dtype=torch.bool))
    assert (blind.output == 0).all()
    assert all(part.isfinite().all() for part in blind)


def test_sharp_scores_and_values_far_away():
    query, key, value = head(6, 6, size=30)
    found, expected = attention_as_filter(query, key, value + 1e6), attend(query, key, value + 1e6)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.collapse_loss, attend(query, key, value).collapse_loss, rtol=1e-6, atol=1e-8)


def test_batches_broadcast_and_are_independent(monkeypatch):
    query, key, value = head(4, 5, batch=(3, 2))
    found = attention_as_filter(query, key[:1], value[0, 0])
    for i, j in np.ndindex(3, 2):
        alone = attention_as_filter(query[i, j], key[0, j], value[0, 0])
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours[i, j], theirs, rtol=1e-13, atol=1e-13)
    monkeypatch.setattr(heads, "GROUP", 1)
    for ours, theirs in zip(attention_as_filter(query, key[:1], value[0, 0]), found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_no_heads():
    query, key, value = head(4, 5, batch=(0,))
    assert attention_as_filter(query, key, value).covariance.shape == (0, 4, 3, 3)
    assert sinkhorn_attention(query, key, value).output.shape == (0, 4, 3)


def test_single_precision():
    query, key, value = (part.float() for part in head(8, 8))
    found = attention_as_filter(query, key, value)
    assert found.output.dtype == torch.float32
    torch.testing.assert_close(found.output, attention(query, key, value), rtol=1e-5, atol=1e-6)


def test_gradients():
    inputs = [part.requires_grad_() for part in head(3, 4, d=2, e=2)]
    prior = t([0.2, 0.3, 0.5]).requires_grad_()

    def moments(query, key, value, prior):
        found = attention_as_filter(query, key, value, query_weights=prior / prior.sum())
        return found.output, found.collapse_loss, found.source_marginal, found.transition

    assert torch.autograd.gradcheck(moments, (*inputs, prior))


# ---------------------------------------------------------------------- Sinkhorn attention


def sinkhorn(scores, steps=5000):
    weights = np.exp(scores - scores.max())
    q, n = weights.shape
    for _ in range(steps):
        weights *= q / n / weights.sum(0)
        weights /= weights.sum(1, keepdims=True)
    return weights


@pytest.mark.parametrize(("q", "n"), [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1), (40, 40)])
def test_sinkhorns_iteration_has_the_same_limit(q, n):
    query, key, value = head(q, n)
    found = sinkhorn_attention(query, key, value)
    expected = sinkhorn(query.numpy() @ key.numpy().T / 2)
    assert found.solution.converged
    close(found.weights, expected, 1e-10)
    close(found.output, expected @ value.numpy(), 1e-10)
    close(found.weights.sum(-2), np.full((n,), q / n), 1e-10)
    close(found.log_weights.mean(), 0.0)


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 100.0])
def test_the_implied_source_is_uniform_also_where_scores_are_sharp(scale):
    query, key, value = head(32, 32, batch=(2,))
    found = sinkhorn_attention(query, key, value, scale=scale)
    assert found.solution.converged.all()
    close(implied_source(found.weights), np.full((2, 32), 1 / 32), 1e-10)
    close(found.weights.sum(-1), torch.ones(2, 32).double(), 1e-10)
    if scale == 1.0:
        plain = attend(query, key, value, scale=scale, source_marginal=True).source_marginal
        assert (plain - 1 / 32).abs().max() > 0.02  # S2-C8: plain attention is not consistent


def test_uniform_weights_survive_a_layer_of_the_filter():
    query, key, value = head(6, 6)
    balanced = sinkhorn_attention(query, key, value)
    found = attention_as_filter(query, key, value, log_weights=balanced.log_weights)
    close(found.source_marginal, np.full((6,), 1 / 6), 1e-10)
    close(found.output, balanced.output, 1e-10)
    close(found.transition, found.weights.mT, 1e-10)  # σ = π′: the two directions are one


def test_gradients_of_sinkhorn_attention():
    inputs = [part.requires_grad_() for part in head(3, 4, d=2, e=2)]

    def output(*parts):
        found = sinkhorn_attention(*parts)
        return found.output, found.weights, found.log_weights

    assert torch.autograd.gradcheck(output, inputs)


def test_too_few_steps_are_told():
    found = sinkhorn_attention(*head(8, 8, size=3), steps=1)
    assert found.solution.status == Status.MAX_STEPS
    assert found.solution.residual > 1e-3


def test_implied_source():
    weights = t(softmax(np.random.default_rng(0).normal(size=(2, 3, 4))))
    close(implied_source(weights), weights.mean(-2))
    prior = t([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    close(implied_source(weights, prior), np.einsum("bqn,bq->bn", weights.numpy(), prior.numpy()))
    close(implied_source(weights, prior[0]), np.einsum("bqn,q->bn", weights.numpy(), prior[0].numpy()))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("call", [attention_as_filter, sinkhorn_attention])
def test_heads_that_are_none(call):
    query, key, value = head(4, 5)
    with pytest.raises(ValueError, match=r"shape \(\*batch, tokens ≥ 1, width ≥ 1\), got \(0, 4\)"):
        call(query[:0], key, value)
    with pytest.raises(ValueError, match=r"key: expected shape \(\*batch, tokens ≥ 1, width ≥ 1\), got \(0, 4\)"):
        call(query, key[:0], value[:0])
    with pytest.raises(ValueError, match=r"value: expected shape .*, got \(5, 0\). A filter needs modes and a state"):
        call(query, key, value[:, :0])
    with pytest.raises(ValueError, match=r"expected \(\*batch, q, d\), \(\*batch, n, d\), \(\*batch, n, e\)"):
        call(query, key, value[:4])
    with pytest.raises(ValueError, match="batch axes that broadcast"):
        call(query.expand(2, 4, 4), key.expand(3, 5, 4), value)
    with pytest.raises(ValueError, match="value: expected finite values"):
        call(query, key, value * torch.inf)
    with pytest.raises(TypeError, match="key: expected dtype"):
        call(query, key.float(), value)
    with pytest.raises(TypeError, match="query: expected float32 or float64"):
        call(query.half(), key.half(), value.half())
    with pytest.raises(TypeError, match=r"query: expected a torch.Tensor"):
        call([1.0], key, value)


def test_what_the_filter_refuses():
    query, key, value = head(4, 5)
    with pytest.raises(ValueError, match=r"causal: expected as many queries as keys, got 4 and 5. Pass a mask"):
        attention_as_filter(query, key, value, causal=True)
    with pytest.raises(ValueError, match=r"n·q·e²/2 up to .*, got n=512, q=512, e=64"):
        attention_as_filter(*head(512, 512, e=64))
    for prior in ([0.5, 0.5, 0, 0], [1.0, 1, 1, 1]):
        with pytest.raises(ValueError, match="query_weights: expected positive weights with sum 1"):
            attention_as_filter(query, key, value, query_weights=t(prior))
    for prior in ([0.2] * 5, [[0.25] * 4] * 2):
        with pytest.raises(
            ValueError, match=r"query_weights: expected shape \(\*batch, q=4\) that broadcasts to \(4,\)"
        ):
            attention_as_filter(query, key, value, query_weights=t(prior))
    with pytest.raises(ValueError, match=r"implied_source.weights: expected shape \(\*batch, q, n\)"):
        implied_source(t([1.0]))
    with pytest.raises(TypeError, match="query_weights: expected dtype"):
        implied_source(t([[1.0]]), torch.ones(1))
