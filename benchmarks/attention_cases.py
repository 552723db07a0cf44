"""Rows of the kernels: statistics of attention beside torch's fused attention of the same shape.

Every row also has the kernel in torch that served before the native one, and naive torch where it is comparable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from benchmarks.bounds import bound
from benchmarks.case import OURS, Case, Prepare, Target, faster, within
from benchmarks.implementations import attention
from benchmarks.inputs import ORDINARY, Attention, title

SDPA, NAIVE, KEOPS, FLEX, FLEX_MEAN = "SDPA", "naive torch", "KeOps", "FlexAttention with G", "FlexAttention, mean only"
THRIFTY, TWICE, FORMER = "naive torch, entropy as G − mean score", "double backward", "former torch path"
STATISTICS, DECODING, INPUTS, THREADS = "statistics", "decoding", "other inputs", "threads"
FULL = "G, mean, entropy, score variance"
LOW_PRECISION = 2e-2  # by which bfloat16 of torch's attention may differ, relative to the largest entry


def kernel_cases(k: int, spread: float) -> list[Case]:
    """Rows whose cost may depend on how sharp the weights are, and, once, those whose cost does not."""
    heads = Attention(8, 2048 // k, 2048 // k, 64, spread)
    cases = [*_statistics(heads), *_retrieval(k, spread), _two_threads("threads", heads, 0.95), *_derivatives(heads)]
    if spread != ORDINARY:
        return cases
    gradient = {
        OURS: attention.gradient(),
        SDPA: attention.fused_gradient,
        FORMER: attention.gradient(attention.FORMER),
        NAIVE: attention.naive_gradient,
    }
    return [
        *cases,
        *_once(k, heads),
        _two_threads("threads-busy", heads, 1.1, busy=1),
        Case(
            *title("gradient", "derivatives", f"backward pass alone, through {FULL}", heads),
            methods=gradient,
            targets=_beside(gradient, bound(0.95)),
        ),
        *_decoding(k),
        *_other_inputs(heads),
    ]


def _methods(*names: str, former: str = attention.FORMER) -> dict[str, Prepare]:
    """The statistics by all four."""
    return {
        OURS: attention.statistics(*names),
        SDPA: attention.fused(),
        FORMER: attention.statistics(*names, backend=former),
        NAIVE: attention.naive(*names),
    }


def _beside(methods: Mapping[str, Prepare], most: float | None) -> tuple[Target, ...]:
    """At most so many times torch's attention; the rest is reported."""
    rest = tuple(faster(name) for name in methods if name not in (OURS, SDPA))
    return within(SDPA, most), *rest


def _statistics(heads: Attention) -> list[Case]:
    causal = replace(heads, causal=True)
    keys_only = {
        OURS: attention.statistics("mean", "entropy", keys_only=True),
        SDPA: attention.fused(keys_only=True),
        FORMER: attention.statistics("mean", "entropy", keys_only=True, backend="fused"),
        FLEX: attention.flex(with_normalizer=True, keys_only=True),
        FLEX_MEAN: attention.flex(with_normalizer=False, keys_only=True),
    }
    entropy = _methods("mean", "entropy", former="fused")
    full = _methods(*attention.FULL)
    of_full = (within(SDPA, bound(0.95, 1.05)), faster(FORMER), faster(NAIVE, 5), faster(THRIFTY))
    return [
        Case(
            *title("entropy", STATISTICS, "G, mean, entropy of the keys", heads),
            methods=keys_only,
            targets=_beside(keys_only, bound(0.95, 1.05)),
        ),
        Case(
            *title("entropy-values", STATISTICS, "G, mean of other values, entropy", heads),
            methods=entropy,
            targets=_beside(entropy, bound(0.95, 1.05)),
        ),
        Case(
            *title("variance", STATISTICS, FULL, heads),
            methods=full | {THRIFTY: attention.naive(thrifty=True)},
            targets=of_full,
        ),
        Case(
            *title("causal", STATISTICS, f"{FULL}, causal", causal),
            methods=full,
            targets=_beside(full, bound(0.80, 0.90)),
        ),
    ]


def _once(k: int, heads: Attention) -> list[Case]:
    every, full = _methods(*attention.EVERY), _methods(*attention.FULL)
    small = _methods(*attention.FULL, former="dense")
    attend = {
        OURS: attention.attended(),
        SDPA: attention.fused(),
        FORMER: attention.attended(attention.FORMER),
        NAIVE: attention.naive("entropy", "value_trace", "log_sum_square"),
    }
    short, tiny = Attention(12, 128, 128, 32, batch=max(1, 64 // k)), Attention(8, 8, 8, 16)
    causal = replace(heads, causal=True)
    return [
        Case(
            *title("attend", STATISTICS, "attend(q, k, v, causal=True)", causal),
            methods=attend,
            targets=_beside(attend, bound(1.0)),
        ),
        Case(
            *title("every", STATISTICS, "every statistic", heads),
            methods=every,
            targets=_beside(every, bound(1.35, 1.5)),
        ),
        Case(*title("short", STATISTICS, FULL, short), methods=full, targets=_beside(full, bound(0.80))),
        Case(*title("tiny", STATISTICS, FULL, tiny), methods=small, targets=_beside(small, 5.0)),
    ]


def _retrieval(k: int, spread: float) -> list[Case]:
    stored = Attention(1, 512 // k, 65536 // k, 16, spread)
    return [
        Case(
            *title("retrieval", "retrieval", FULL, stored),
            methods={
                OURS: attention.statistics(*attention.FULL, keys_only=True),
                SDPA: attention.fused(keys_only=True),
                FORMER: attention.statistics(*attention.FULL, keys_only=True, backend=attention.FORMER),
                NAIVE: attention.naive(keys_only=True),
                THRIFTY: attention.naive(keys_only=True, thrifty=True),
                KEOPS: attention.keops,
            },
            targets=(
                *(within(SDPA, bound(0.85)), faster(FORMER)),
                *(faster(NAIVE, 10), faster(THRIFTY), faster(KEOPS, 25)),
            ),
        )
    ]


def _two_threads(name: str, heads: Attention, most: float, busy: int = 0) -> Case:
    """By the wall clock; ``busy``: so many other processes want the cores."""
    methods = _methods(*attention.FULL)
    work = FULL + ", another process busy" * (busy > 0)
    return Case(*title(name, THREADS, work, heads), methods, _beside(methods, bound(most)), threads=2, busy=busy)


def _derivatives(heads: Attention) -> list[Case]:
    both = {
        OURS: attention.statistics_backward(),
        SDPA: attention.fused_backward,
        FORMER: attention.statistics_backward("fused"),
    }
    product = {
        OURS: attention.fisher_product(),
        SDPA: attention.fused(),
        FORMER: attention.fisher_product(attention.FORMER),
        TWICE: attention.double_backward,
    }
    return [
        Case(
            *title("fisher", "derivatives", "Fisher-vector product", heads),
            methods=product,
            targets=(within(SDPA, bound(1.35)), faster(FORMER), faster(TWICE, 6)),
        ),
        Case(
            *title("backward", "derivatives", "attention with G, forward and backward through both", heads),
            methods=both,
            targets=_beside(both, bound(0.95, 1.05)),  # that of each half
        ),
    ]


def _decoding(k: int) -> list[Case]:
    """One new query, and keys from a cache."""
    near, far = Attention(8, 1, 2048 // k, 64), Attention(8, 1, 32768 // k, 64)
    shared = Attention(32, 1, 4096 // k, 128, key_heads=8)
    full, small = _methods(*attention.FULL), _methods(*attention.FULL, former="dense")
    attend = {
        OURS: attention.attended(),
        SDPA: attention.fused(),
        FORMER: attention.attended("dense"),
        NAIVE: attention.naive("entropy", "value_trace", "log_sum_square"),
    }
    return [
        Case(*title("decode", DECODING, FULL, near), methods=small, targets=_beside(small, bound(0.70))),
        Case(*title("decode-far", DECODING, FULL, far), methods=full, targets=_beside(full, bound(0.95))),
        Case(*title("decode-attend", DECODING, "attend(q, k, v)", near), attend, _beside(attend, bound(1.5))),
        Case(*title("decode-grouped", DECODING, FULL, shared), methods=full, targets=_beside(full, None)),
    ]


def _other_inputs(heads: Attention) -> list[Case]:
    """Shown, without a bound."""
    variants = {
        "float64": (FULL, replace(heads, dtype=torch.float64)),
        "bfloat16": (FULL, replace(heads, dtype=torch.bfloat16)),
        "padding": (f"{FULL}, a quarter of the keys masked", replace(heads, support="padding")),
        "weights": (f"{FULL}, log weights of keys", replace(heads, support="weights")),
        "biases": (f"{FULL}, log weights of pairs", replace(heads, support="biases")),
        "wide-values": (FULL, replace(heads, value_dim=2 * heads.dim)),
    }
    methods = _methods(*attention.FULL)
    cases = {
        name: Case(*title(name, INPUTS, work, inputs), methods=methods, targets=_beside(methods, None))
        for name, (work, inputs) in variants.items()
    }
    return list((cases | {"bfloat16": replace(cases["bfloat16"], tolerance=LOW_PRECISION)}).values())
