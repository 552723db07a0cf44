"""How far one kernel path on a device is from float64: `python -m benchmarks.device_accuracy PATH DEVICE TOKENS`.

Values are compared with sums in long double on the processor, gradients with those of the reference in float64 there,
of the same rounded inputs. A process of its own for each path: what ends it ends no other. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TypedDict

import torch

from benchmarks.accuracy import Problem, error, exact, gradients, problems
from cumulant.kernels import moments

PATHS = ("auto", "triton", "fused", "streaming", "dense")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE, WITH_OFFSET = 1e-4, 1e-3  # of the largest number; gradients lose digits where values have a common offset
WANTED = {"fused": ("mean", "entropy")}
EVERY = ("mean", "entropy", "score_variance", "value_trace")


class Row(TypedDict):
    """One problem on one path: largest errors relative to the largest number, or why it is not served."""

    path: str
    problem: str
    dtype: str
    errors: dict[str, float]
    refused: str | None


def rows(path: str, device: str, tokens: int) -> Iterator[Row]:
    """Every problem in every dtype."""
    for problem in problems(tokens):
        for dtype in DTYPES:
            rounded = problem.rounded(dtype).rounded(torch.float64)
            row = Row(path=path, problem=problem.name, dtype=str(dtype).split(".")[1], errors={}, refused=None)
            try:
                row["errors"] = errors_of(problem.rounded(dtype), rounded, path, device)
            except ValueError as refusal:  # a path that does not serve this says so
                row["refused"] = str(refusal)
            yield row


def errors_of(x: Problem, double: Problem, path: str, device: str) -> dict[str, float]:
    there, wanted = x.moved(device), list(WANTED.get(path, EVERY))
    m = None
    for names in (wanted, wanted[:3], wanted[:2]):  # a path may serve fewer statistics
        try:
            m = moments(
                there.eta[None],
                there.atoms[None],
                there.values[None],
                statistics=names,
                backend=path,
                **there.support,  # pyright: ignore[reportArgumentType]
            )
        except ValueError:
            if names == wanted[:2]:
                raise
            continue
        wanted = names
        break
    assert m is not None
    right = exact(double)
    found = {name: error(getattr(m, name)[0].cpu(), right[name]) for name in ("log_normalizer", *wanted)}
    pulled = [name for name in ("mean", "log_normalizer", "entropy", "score_variance") if name in found]
    if "value_trace" in found:
        pulled.append("value_trace")
    exactly = gradients(double, "dense", pulled)
    for name, ours, theirs in zip(("eta", "atoms", "values"), gradients(there, path, pulled), exactly, strict=True):
        # a gradient has the dtype of its tensor: what half precision rounds at the end is no error of the kernel
        close = theirs.to(ours.dtype).double() if ours.dtype != torch.float32 else theirs
        found[f"gradient of {name}"] = error(ours.cpu().double(), close.numpy().astype("longdouble"))
    return found


def faults(found: Sequence[Row]) -> list[str]:
    """What is further from float64 than `TOLERANCE` (gradients in half precision: than its last two bits)."""
    words = []
    for row in found:
        for name, size in row["errors"].items():
            bits = {"float32": 0.0, "bfloat16": 2.0**-7, "float16": 2.0**-10}[row["dtype"]]
            most = WITH_OFFSET if "offset" in row["problem"] else TOLERANCE
            if not size <= max(most, bits if name.startswith("gradient") else 0.0):  # also NaN
                words.append(f"{row['path']}, {row['problem']}, {row['dtype']}: {name} is off by {size:.1e}")
    return words


def main(arguments: Sequence[str]) -> None:
    path, device, tokens = arguments
    print(json.dumps(list(rows(path, device, int(tokens)))))


if __name__ == "__main__":
    main(sys.argv[1:])
