"""The cluster bootstrap: draws are merged records, intervals those of NumPy, and they cover where tokens are alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from cumulant.observatory import observe  # noqa: E402
from cumulant.observatory.record.bootstrap import (  # noqa: E402
    DocumentRecords,
    cluster_intervals,
    cluster_jackknife,
    draw_counts,
)
from cumulant.observatory.record.meta import Meta  # noqa: E402
from cumulant.observatory.record.record import AttentionLayer, Record  # noqa: E402
from cumulant.observatory.record.tables import head_rows, layer_table  # noqa: E402
from cumulant.observatory.statistics.tally import Tally  # noqa: E402
from tests.compare import close  # noqa: E402
from tests.observatory.test_models import byte_tokenizer  # noqa: E402

LAYER = AttentionLayer("attention", "self", 2, 2, 4, 4, 0.5)
TEXTS = ("to be or not to be, that is the question", "all the world's a stage", "now is the winter of our discontent")


def of_values(values: np.ndarray) -> Record:
    """A document in which two heads had these numbers, (2, n)."""
    tally = Tally.of(torch.as_tensor(values))
    return Record((LAYER,), {"attention/entropy": tally}, {}, {}, {}, (), Meta(tokens=values.shape[1]))


def means(record: Record) -> dict[str, float]:
    return {f"head {head}": float(x) for head, x in enumerate(record.tally("entropy").mean)}


@pytest.fixture(scope="module")
def documents() -> list[Record]:
    """Three texts, each read alone by a small model."""
    small = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(**small, intermediate_size=16)).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    return [observe(model, [text], tokenizer=tokenizer) for text in TEXTS]


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 0, 1), (0, 3, 0)])
def test_a_draw_is_the_merge_of_its_documents(counts, documents):
    merged = None
    for record, count in zip(documents, counts, strict=True):
        for _ in range(count):
            merged = record if merged is None else merged.merge(record)
    drawn = DocumentRecords(documents).counted(torch.tensor(counts))
    assert drawn.meta.tokens == merged.meta.tokens
    for name, tally in merged.tallies.items():
        for part, tensor in tally.tensors().items():
            close(getattr(drawn.tallies[name], part), tensor, 1e-9)
    for name, tensor in merged.sums.items():
        close(drawn.sums[name], tensor, 1e-9)
    for row, other in zip(head_rows(drawn), head_rows(merged), strict=True):
        fits = {name: value for name, value in other.numbers.items() if name not in ("gradientness", "ascent_index")}
        assert {name: row.numbers[name] for name in fits} == pytest.approx(fits, rel=1e-6, nan_ok=True)
    for row, other in zip(layer_table(drawn), layer_table(merged), strict=True):
        for name in ("rms", "growth", "step", "contraction"):
            assert getattr(row, name) == pytest.approx(getattr(other, name), rel=1e-6, nan_ok=True)


def test_intervals_are_those_of_numpy():
    random = np.random.default_rng(0)
    values = [random.normal(d % 3, 1, size=(2, 5 + 7 * d)) for d in range(9)]
    found = cluster_intervals([of_values(v) for v in values], means, replicates=300, seed=4)
    counts = draw_counts(9, 300, seed=4).numpy()
    drawn = np.array(
        [np.concatenate([np.repeat(v, c, 1) for v, c in zip(values, row, strict=True)], 1).mean(1) for row in counts]
    )
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    for head in (0, 1):
        value, *ends, error = found[f"head {head}"]
        assert value == pytest.approx(np.concatenate(values, 1).mean(1)[head], abs=1e-12)
        assert ends == pytest.approx([low[head], high[head]], abs=1e-12)
        assert error == pytest.approx(drawn[:, head].std(ddof=1), abs=1e-12)


def of_link(random: np.random.Generator, slopes: int, queries: int) -> Record:
    """A document whose queries have nothing to do with the means they retrieve."""
    eta, mean = (torch.as_tensor(random.normal(size=(2, queries, slopes))) for _ in range(2))
    number = torch.full((2,), float(queries), dtype=torch.float64)
    sums = {"link/count": number, "link/eta": eta.sum(1), "link/mean": mean.sum(1), "link/eta_eta": eta.mT @ eta}
    sums |= {"link/mean_mean": mean.mT @ mean, "link/eta_mean": eta.mT @ mean}
    sums |= {"keys/count": number, "keys/sum": eta.sum(1), "keys/square": eta.mT @ eta}
    layer = LAYER._replace(dim=slopes)
    return Record((layer,), {}, {f"attention/{name}": x for name, x in sums.items()}, {}, {}, (), Meta(tokens=queries))


def fitted(record: Record) -> dict[str, float]:
    return {f"head {row.head}": row.numbers["link_r2"] for row in head_rows(record)}


def test_a_fit_gains_from_documents_drawn_twice_but_not_from_leaving_them_out():
    """R² of 20 slopes on nothing is 0 when adjusted; the interval of draws with replacement lies above that."""
    random = np.random.default_rng(3)
    records = [of_link(random, 20, 6) for _ in range(20)]
    drawn = cluster_intervals(records, fitted, replicates=60)["head 0"]
    left_out = cluster_jackknife(records, fitted)["head 0"]
    assert left_out.low <= left_out.value <= left_out.high
    assert left_out.low <= 0 <= left_out.high
    assert drawn.low > max(0.0, drawn.value)


def test_leaving_documents_out_gives_the_error_of_a_mean():
    random = np.random.default_rng(0)
    values = [random.normal(d % 3, 1, size=(2, 7)) for d in range(9)]
    found = cluster_jackknife([of_values(v) for v in values], means)["head 1"]
    each = np.array([v[1].mean() for v in values])
    assert found.value == pytest.approx(each.mean(), abs=1e-12)
    assert found.error == pytest.approx(each.std(ddof=1) / 3, abs=1e-12)
    assert found.high - found.value == pytest.approx(2.306004 * found.error, rel=1e-6)


@pytest.mark.long
def test_they_cover_where_errors_that_count_tokens_do_not():
    random = np.random.default_rng(1)
    trials, by_document, by_token = 60, 0, 0
    for trial in range(trials):  # documents differ by as much as the tokens inside them; the true mean is 0
        values = [random.normal(random.normal(), 1, size=(2, 40)) for _ in range(20)]
        records = [of_values(v) for v in values]
        interval = cluster_intervals(records, means, replicates=100, seed=trial)["head 0"]
        tally = DocumentRecords(records).counted(torch.ones(20, dtype=torch.int64)).tally("entropy")
        by_document += interval.low <= 0 <= interval.high
        by_token += abs(float(tally.mean[0])) <= 1.96 * float(tally.standard_error[0])
    assert by_document / trials > 0.85
    assert by_token / trials < 0.5


def test_what_cannot_be_drawn_gets_a_sentence():
    one = of_values(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"cluster_intervals.records: expected at least two documents, got 1"):
        cluster_intervals([one], means)
    other = Record((LAYER._replace(name="else"),), {}, {}, {}, {}, (), Meta())
    with pytest.raises(ValueError, match=r"DocumentRecords.records: expected records of one model, got of several"):
        cluster_intervals([one, other], means)
    with pytest.raises(ValueError, match=r"cluster_jackknife.records: expected at least two documents, got 1"):
        cluster_jackknife([one], means)
    with pytest.raises(ValueError, match=r"cluster_intervals.replicates"):
        cluster_intervals([one, one], means, replicates=1)
