"""Time and memory of functions in this process.

Machines are noisy and drift. Functions are therefore timed in turns, and a ratio is the median over rounds of the two
times taken in the same round, with its quartiles.
"""

from __future__ import annotations

import ctypes
import gc
import math
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

Samples = dict[str, list[float | None]]  # seconds a call, one entry a round; None where a method sat a round out

SAMPLE = 0.02  # a sample lasts at least that many seconds, if need be by several calls
SETTLED = 0.005  # rounds end early once every ratio has this relative standard error
MIB = 1 << 20


class Quartiles(NamedTuple):
    """Median, quartiles and number of samples."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(samples: Iterable[float]) -> Quartiles:
        """
        >>> Quartiles.of([1.0, 2.0, 3.0, 4.0, 100.0])
        Quartiles(median=3.0, low=2.0, high=4.0, count=5)
        """
        ordered = sorted(samples)
        if len(ordered) < 2:
            return Quartiles(ordered[0], ordered[0], ordered[0], 1)
        low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
        return Quartiles(median, low, high, len(ordered))

    @property
    def error(self) -> float:
        """Standard error of the median relative to it, were the samples normal: 0.93 · interquartile range / √count."""
        return 0.93 * (self.high - self.low) / math.sqrt(self.count) / abs(self.median) if self.median else math.inf


class DeviceEvents(NamedTuple):
    """Seconds of a CUDA device: between two events of its stream, around what is queued there.

    Where Python queues work more slowly than the device does it, the gaps count too.
    """

    device: torch.device

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        with torch.cuda.device(self.device):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()  # what was queued before is no part of it
            before.record()
            for _ in range(calls):
                run()
            after.record()
            after.synchronize()
        return before.elapsed_time(after) / 1000


Clock = Callable[[], float] | DeviceEvents


def interleave(
    methods: Mapping[str, Callable[[], object]],
    *,
    clock: Clock = time.process_time,
    repeats: int = 7,
    budget: float = 20.0,
    pairs: Sequence[tuple[str, str]] = (),
    tick: Callable[[float], None] | None = None,
) -> Samples:
    """Time ``methods`` in turns, at least ``repeats`` rounds and about ``budget`` seconds.

    Every method may use an equal share of the budget; one that has used it up sits out, so that slow peers do not
    starve quick ones. Rounds end early when the ratios of ``pairs`` have settled. ``tick`` is called with the fraction
    that is done.
    """
    calls = {name: _calls_per_sample(method, clock) for name, method in methods.items()}
    samples: Samples = {name: [] for name in methods}
    spent = dict.fromkeys(methods, 0.0)
    share = budget / len(methods)
    turn = 0
    with _no_collection():
        while True:
            active = [name for name in methods if turn < repeats or spent[name] < share]
            if not active or (turn >= repeats and pairs and _settled(samples, pairs)):
                return samples
            for name in active if turn % 2 == 0 else reversed(active):
                wall = time.perf_counter()
                samples[name].append(_sample(methods[name], clock, calls[name]))
                spent[name] += time.perf_counter() - wall
            for name in methods.keys() - set(active):
                samples[name].append(None)
            turn += 1
            if tick:
                tick(min(turn / repeats, sum(spent.values()) / budget, 1.0))


def seconds(samples: Samples, name: str) -> Quartiles:
    """Time of one method."""
    return Quartiles.of(t for t in samples[name] if t is not None)


def ratio(samples: Samples, name: str, other: str) -> Quartiles:
    """name / other over the rounds in which both ran."""
    rounds = zip(samples[name], samples[other], strict=True)
    return Quartiles.of(a / max(b, 1e-9) for a, b in rounds if a is not None and b is not None)


def extra_memory(run: Callable[[], object]) -> float:
    """MiB by which one call of ``run`` lifts the peak of resident memory above what this process holds now.

    Linux has the peak of the process as VmHWM and can reset it. `getrusage`, the fallback, cannot be reset, and on
    Linux starts at the peak of the process that launched this one.
    """
    gc.collect()
    _trim()
    before = _peak() if _reset_peak() else max(_peak(), _resident())
    result = run()
    after = _peak()
    del result
    return max(0.0, after - before)


def _sample(run: Callable[[], object], clock: Clock, calls: int) -> float:
    if isinstance(clock, DeviceEvents):
        return clock.seconds(run, calls) / calls
    start = clock()
    for _ in range(calls):
        run()
    return (clock() - start) / calls


def _calls_per_sample(run: Callable[[], object], clock: Clock) -> int:
    """Also the warm-up."""
    run()
    return max(1, math.ceil(SAMPLE / max(_sample(run, clock, 1), 1e-6)))


def _settled(samples: Samples, pairs: Sequence[tuple[str, str]]) -> bool:
    return all(ratio(samples, a, b).error < SETTLED for a, b in pairs)


class _no_collection:
    """Garbage is collected before, not during."""

    def __enter__(self) -> None:
        gc.collect()
        self.enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            gc.enable()


def _status(field: str) -> float | None:
    """A size of /proc/self/status in MiB."""
    try:
        line = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(line[1]) / 1024 if line else None


def _peak() -> float:
    unit = MIB if sys.platform == "darwin" else 1024
    peak = _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit if peak is None else peak


def _resident() -> float:
    return _status("VmRSS") or 0.0


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _trim() -> None:
    """Hand freed memory back, so that what set-up has freed does not hide what the run takes."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # not glibc
        return
