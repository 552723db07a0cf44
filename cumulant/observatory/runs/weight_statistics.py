"""Numbers of a head that follow from its weights, and from the covariance of the states it reads."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from cumulant.observatory.hooks.structure import block_of
from cumulant.observatory.hooks.weights import HeadWeights, ascent_index, head_weights
from cumulant.observatory.record.record import Record
from cumulant.observatory.report.tables import read_covariance
from cumulant.residual import gradientness


def with_weights(record: Record, model: nn.Module) -> Record:
    """The record with gradient-ness and ascent index of every head whose weights are known."""
    numbers: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    for layer in record.layers:
        weights = head_weights(model, layer.name)
        if not isinstance(weights, HeadWeights):
            reasons[layer.name] = weights.reason
            continue
        if weights.crossed:
            continue  # queries and keys live in different streams: no gradient of one function of one state
        cosine = gradientness(weights.query, weights.key, weights.value, weights.output)
        numbers[f"{layer.name}/gradientness"] = cosine
        block = block_of(model, layer.name)
        covariance = None if block is None else read_covariance(record.hidden, record.meta.stages, block)
        if covariance is not None and covariance.shape[0] == weights.query.shape[-1] and not weights.hidden:
            if weights.passed is not None:  # covariances behind a norm are kept without its gain
                covariance = weights.passed[:, None] * covariance * weights.passed
            numbers[f"{layer.name}/ascent_index"] = ascent_index(weights, covariance, layer.scale)
    return replace(record, weights=numbers, meta=replace(record.meta, unknown_weights=reasons))
