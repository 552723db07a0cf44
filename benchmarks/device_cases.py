"""Rows of the kernels on a device that is not the processor: the same work and peers, on tensors that lie there.

Nothing here has been measured by those who wrote it, so no row has a bound: ratios are reported, not judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_cases import FLEX, FLEX_MEAN, SDPA, kernel_cases
from benchmarks.case import OURS, Case, Inputs, Target, within
from benchmarks.implementations import attention
from benchmarks.inputs import ORDINARY

ROWS = (  # of attention_cases; those of threads are about processors, that of float64 has no fused peer
    *("entropy", "entropy-values", "variance", "causal", "attend", "every", "short", "retrieval", "backward"),
    *("gradient", "fisher", "decode", "decode-far", "decode-attend", "decode-grouped"),
    *("bfloat16", "padding", "weights", "biases", "wide-values"),
)
BESIDE_FLEX = ("entropy-values", "variance", "causal", "attend", "every", "short", "bfloat16", "decode-grouped")


def catalogue(quick: bool = False) -> dict[str, Case]:
    """The rows by name, without bounds, beside torch's attention and FlexAttention."""
    cases = {case.name: case for case in kernel_cases(8 if quick else 1, ORDINARY)}
    return {name: _on_device(cases[name]) for name in ROWS}


def _on_device(case: Case) -> Case:
    methods = dict(case.methods)
    if case.name in BESIDE_FLEX:
        methods[FLEX] = attention.flex(with_normalizer=True)
    peers = [name for name in (SDPA, FLEX, FLEX_MEAN) if name in methods]
    peers += [name for name in methods if name not in (OURS, *peers)]
    targets: tuple[Target, ...] = tuple(within(name) for name in peers)
    return replace(case, methods=methods, targets=targets, threads=1, busy=0)


@dataclass(frozen=True)
class Placed:
    """Inputs whose tensors lie on a device; the same numbers as on the processor."""

    inputs: Inputs
    device: str

    def __call__(self) -> Any:
        tensors = self.inputs()
        return type(tensors)(*(t.to(self.device) if isinstance(t, Tensor) else t for t in tensors))

    def small(self) -> Placed:
        return Placed(self.inputs.small(), self.device)


def placed(case: Case, device: str) -> Case:
    """The case on a device; unchanged on the processor."""
    return case if torch.device(device).type == "cpu" else replace(case, inputs=Placed(case.inputs, device))
