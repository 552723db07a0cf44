"""Machine code of the Triton kernels for devices that are not here: it compiles, spills nothing, fits into memory."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from cumulant import moments
from tests.kernels.triton.launches import Launch, compiled, recorded

SHARED = {80: 163_000, 90: 227_000}  # bytes that a program may have
STATISTICS = ("mean", "entropy", "score_variance")
SHORT = {("bfloat16", 64, "causal", 90)}


class Case(NamedTuple):
    dtype: str
    width: int
    arguments: str
    capability: int


CASES = [
    Case(dtype, width, arguments, capability)
    for dtype in ("float32", "float16", "bfloat16")
    for width in (64, 128)
    for arguments in ("causal", "everything")
    for capability in (80, 90)
] + [Case("float32", 16, "everything", 80), Case("bfloat16", 256, "causal", 90)]


def empty(*shape: int, dtype: torch.dtype, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def launches(case: Case, queries: int, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Of a forward and a backward pass with 8 heads on 2 of keys."""
    dtype, d, n = getattr(torch, case.dtype), case.width, 4096
    q, k, v = (empty(2, heads, rows, d, dtype=dtype) for heads, rows in ((8, queries), (2, n), (2, n)))
    options: dict = {"causal": True, "offset": n - queries - 1, "statistics": STATISTICS}
    if case.arguments == "everything":
        options |= {
            "window": 300,
            "mask": empty(2, 8, queries, n, dtype=torch.bool, grad=False),
            "log_weights": empty(2, 8, queries, n, dtype=dtype),
            "sink": empty(2, 8, dtype=torch.float32),
            "statistics": (*STATISTICS, "effective_atoms", "max_score"),
        }
    with recorded(monkeypatch) as found:
        m = moments(q, k, v, backend="triton", **options)
        rest = [t.sum() for name, t in m.statistics.items() if t.requires_grad and name != "max_score"]
        torch.stack([m.log_normalizer.sum(), *rest]).sum().backward()
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in SHORT else pytest.mark.long, id=" ".join(map(str, c))) for c in CASES],
)
def test_no_kernel_spills_registers(case: Case, monkeypatch):
    found = launches(case, 1024, monkeypatch)
    names = [launch.kernel.__name__ for launch in found]
    assert names == ["finite_kernel", "forward_kernel", "finite_kernel", "queries_kernel", "keys_kernel"]
    for launch in found[1:2] + found[3:]:
        code = compiled(launch, case.capability)
        print(*case, launch.kernel.__name__, *code)  # noqa: T201
        assert code.spilled == 0, launch.kernel.__name__
        assert code.registers <= 255
        assert code.shared <= SHARED[case.capability]


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_kernel_for_few_rows_spills_registers(dtype, capability, monkeypatch):
    found = launches(Case(dtype, 128, "causal", capability), 1, monkeypatch)
    names = [launch.kernel.__name__ for launch in found]
    assert names[:3] == ["finite_kernel", "forward_kernel", "merge_kernel"]
    for launch in found[:3]:
        code = compiled(launch, capability)
        print(dtype, capability, launch.kernel.__name__, *code)  # noqa: T201
        assert code.spilled == 0, launch.kernel.__name__
        assert code.shared <= SHARED[capability]


def test_grids_cover_queries_keys_and_columns(monkeypatch):
    prefill = {
        launch.kernel.__name__: launch for launch in launches(Case("bfloat16", 128, "causal", 90), 1024, monkeypatch)
    }
    heads, groups, tiles, chunks = 8, 4, 1024 // 64, 2  # 64 queries and 64 columns a program
    assert prefill["finite_kernel"].grid == (groups * 4096 // 64,)
    assert prefill["forward_kernel"].grid == (2 * heads * tiles * chunks,)
    assert prefill["queries_kernel"].grid == (2 * heads * tiles * chunks,)
    assert prefill["keys_kernel"].grid == (groups * 4096 // 64 * chunks,)
    decode = {
        launch.kernel.__name__: launch for launch in launches(Case("bfloat16", 128, "causal", 90), 1, monkeypatch)
    }
    assert decode["forward_kernel"].constants["PACKED"]  # four heads that share keys in one tile
    assert decode["forward_kernel"].constants["BLOCK_M"] == 16
    parts = decode["forward_kernel"].grid[0] // (groups * chunks)
    assert parts == 16  # of 256 keys
    assert decode["merge_kernel"].grid == (1 * chunks,)  # 16 queries of all groups


def test_no_query_launches_nothing(monkeypatch):
    with recorded(monkeypatch) as found:
        moments(
            empty(0, 3, dtype=torch.float32), empty(5, 3, dtype=torch.float32), backend="triton"
        ).mean.sum().backward()
    assert found == []


@pytest.mark.parametrize("wrong", ["atoms", "mask", "offset"])
def test_arguments_are_checked_before_a_launch(wrong, monkeypatch):
    q, k = empty(4, 3, dtype=torch.float32), empty(5, 2 if wrong == "atoms" else 3, dtype=torch.float32)
    options = {"mask": torch.ones(5)} if wrong == "mask" else {"causal": wrong == "offset"}
    with recorded(monkeypatch) as found, pytest.raises((TypeError, ValueError), match=f"moments.{wrong}: expected"):
        moments(q, k, backend="triton", **options)
    assert found == []
