"""What follows from the weights of a model alone, or with the covariance of its states: numbers of every head."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from cumulant.observatory.hooks.structure import block_of
from cumulant.observatory.hooks.weights import HeadWeights, ascent_index, head_weights
from cumulant.observatory.record.record import Record
from cumulant.observatory.record.tables import read_covariance
from cumulant.residual import gradientness


def with_weights(record: Record, model: nn.Module) -> Record:
    """The record with gradient-ness and ascent index of every head whose weights are known."""
    numbers: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    dimension = record.meta.dimension
    for layer in record.modules:
        weights = head_weights(model, layer.name)
        if not isinstance(weights, HeadWeights):
            reasons[layer.name] = weights.reason
            continue
        dimension = dimension or weights.query.shape[-1]
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
    return replace(record, weights=numbers, meta=replace(record.meta, unknown_weights=reasons, dimension=dimension))
