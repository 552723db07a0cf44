"""What the native kernel is to reach on this machine, beside torch's fused attention.

Bounds were set on AMD processors, for each instruction set. torch's attention calls MKL, which is nearer to what the
hardware can do on Intel's; there the bounds are wider. Where no native kernel serves, those of AVX2 hold: that the
kernels in torch miss them is what the table is to show.
"""

from __future__ import annotations

from cumulant.kernels.native.library import library
from cumulant.kernels.native.targets import processor_name

ON_INTEL = 0.15


def instruction_set() -> str | None:
    """That of the native kernel; None where the kernels in torch serve."""
    loaded = library()
    return None if loaded is None else loaded.instruction_set


def bound(avx512: float, avx2: float | None = None) -> float:
    """The most that the time may be of torch's; one number where both builds are to reach the same."""
    times = avx512 if avx2 is None or instruction_set() == "x86-64-v4" else avx2
    return times + ON_INTEL if "intel" in processor_name().lower() else times
