"""I6 and J5: one number under five names, and the numbers of the Hopfield papers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy.special import lambertw

from cumulant import attend, attention
from cumulant.contrastive import info_nce, linear_cross_entropy
from cumulant.hopfield import CLASSES, capacity, energy, head_class, mass_count, retrieve
from cumulant.paper.checks.evidence import Evidence, agrees, true
from cumulant.paper.checks.oracle import softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import check
from cumulant.regression import nadaraya_watson


@check("I6", "attention = Hopfield step = gradient of InfoNCE = gradient of cross-entropy = Nadaraya–Watson")
def five_names(inputs: RandomInputs) -> Iterator[Evidence]:
    queries, keys, beta = inputs.normal(5, 4), inputs.normal(9, 4), 0.7
    truth = softmax(beta * queries @ keys.T, axis=1) @ keys
    query, key = tensor(queries), tensor(keys)
    yield agrees("attend", attend(query, key, scale=beta).output, truth, 1e-12)
    yield agrees("attention with V = K", attention(query, key, key, scale=beta), truth, 1e-12)
    yield agrees("one Hopfield step", retrieve(query, key, beta=beta, steps=1).state, truth, 1e-12)
    regression = nadaraya_watson(query, key, key, kernel="dot", bandwidth=beta**-0.5)
    yield agrees("kernel regression", regression.mean, truth, 1e-12)

    moving = query.clone().requires_grad_()
    (slope,) = torch.autograd.grad(info_nce(moving, key, temperature=1 / beta, reduction="sum"), moving)
    yield agrees("InfoNCE: τ∇ + k⁺", slope / beta + key[:5], truth, 1e-12)
    hidden = (beta * query).requires_grad_()
    loss = linear_cross_entropy(hidden, key, torch.arange(5), reduction="sum")
    assert isinstance(loss, torch.Tensor)
    (slope,) = torch.autograd.grad(loss, hidden)
    yield agrees("cross-entropy: ∇ + w_y", slope + key[:5], truth, 1e-12)


@check("J5", "Hopfield numbers: energies, storage capacity and class of a head")
def golden_values(inputs: RandomInputs) -> Iterator[Evidence]:
    patterns, state = tensor([[1, 0], [0, 1], [-1, 0]]), tensor([0.5, 0.25])
    for beta, before, after in ((1.0, 0.490939721599, 0.447987786264), (4.0, 0.349262411850, 0.312428513521)):
        ours = retrieve(state, patterns, beta=beta, steps=1)
        yield agrees(f"E before and after one step, β = {beta:g}", ours.energy, [before, after], 1e-11)
        yield agrees(f"E at the state retrieved, β = {beta:g}", energy(ours.state, patterns, beta=beta), after, 1e-11)
    for dim, radius, base in ((20, 3.0, 3.15461077), (75, 1.0, 1.37187777)):
        ours = capacity(dim, beta=1.0, radius=radius, failure=0.001)
        yield agrees(f"c as published, d = {dim}, K = {radius:g}", ours.base, base, 1e-7)
        a = 2 / (dim - 1) * (1 + np.log(2 * radius**2 * 0.001 * (dim - 1)))
        b = 2 * radius**2 / 5
        yield agrees(f"c = b/W₀(e^(a + ln b)), d = {dim}", ours.base, b / lambertw(np.exp(a + np.log(b))).real, 1e-12)
        yield true(f"c reaches its threshold, d = {dim}", ours.holds)
    count = mass_count(tensor(np.full(32, 1 / 32)))
    yield agrees("0.9 of a uniform law over 32 keys needs 29", count, np.ceil(0.9 * 32), 0.0)
    yield true("and is of class I", CLASSES[int(head_class(count, 32))] == "I")
