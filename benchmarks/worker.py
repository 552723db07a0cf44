"""One case in a process of its own: `python -m benchmarks.worker`, a request on stdin, events on stdout.

request   {source, case, quick, device, mode: "time" | "memory", methods, threads, repeats, budget}
events    {"method": name} before it first runs, {"done": fraction}, and at the end {"answer": …}
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Run, Unavailable
from benchmarks.device_cases import placed
from benchmarks.measure import Clock, DeviceEvents, extra_memory, interleave, ratio, seconds

# ends with the process that started it, however that ends
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"

Emit = Callable[[dict[str, Any]], None]


def main() -> None:
    """Answer one request."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print; only events may reach the channel

    def emit(event: dict[str, Any]) -> None:
        channel.write(json.dumps(event) + "\n")
        channel.flush()

    request = json.load(sys.stdin)
    case = importlib.import_module(request["source"]).catalogue(request["quick"])[request["case"]]
    case = placed(case, request["device"])
    torch.set_num_threads(request["threads"])
    answer = take_time(case, request, emit) if request["mode"] == "time" else take_memory(case, request, emit)
    emit({"answer": answer})


def take_time(case: Case, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Seconds of every method, and the ratios that the targets name."""
    runs: dict[str, Run] = {}
    results: dict[str, Mapping[str, Tensor]] = {}
    skipped: dict[str, str] = {}
    inputs = case.inputs()
    for name in request["methods"]:
        emit({"method": name})
        try:
            runs[name] = case.methods[name](inputs)
            results[name] = runs[name]()
        except Exception as error:  # a peer may fail in any way; the others are still measured
            runs.pop(name, None)
            skipped[name] = reason(error)
    problem = disagreement(results, case.tolerance)
    results.clear()
    emit({"method": None})
    pairs = [(t.method, t.peer) for t in case.targets if t.quantity == "time" and t.peer]
    pairs = [(a, b) for a, b in pairs if a in runs and b in runs]
    clock = clock_of(request["device"], request["threads"])
    settings = {"clock": clock, "repeats": request["repeats"], "budget": request["budget"], "pairs": pairs}
    with busy_processes(case.busy):
        samples = interleave(runs, **settings, tick=lambda done: emit({"done": done})) if runs else {}
    return {
        "seconds": {name: seconds(samples, name)._asdict() for name in runs},
        "ratios": [[a, b, ratio(samples, a, b)._asdict()] for a, b in pairs],
        "skipped": skipped,
        "problem": problem,
    }


def clock_of(device: str, threads: int) -> Clock:
    """Processor time of one thread, wall time of several; events of a CUDA device."""
    if device != "cpu":
        return DeviceEvents(torch.device(device))
    return time.process_time if threads == 1 else time.perf_counter


def take_memory(case: Case, request: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Extra MiB of the one method that runs in this process."""
    (name,) = request["methods"]
    emit({"method": name})
    try:
        case.methods[name](case.inputs.small()())()
        run = case.methods[name](case.inputs())
        return {"extra_mib": extra_memory(run), "skipped": {}}
    except Exception as error:  # whatever a method raises becomes its reason for being left out
        return {"extra_mib": None, "skipped": {name: reason(error)}}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that do nothing but want a core."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def disagreement(results: Mapping[str, Mapping[str, Tensor]], tolerance: float) -> str | None:
    """Methods do the same work only if what they both return is the same."""
    if not results:
        return None
    first, *others = results
    for other in others:
        for key in results[first].keys() & results[other].keys():
            a, b = results[first][key], results[other][key]
            if a.shape != b.shape:
                return f"{key} has shape {tuple(a.shape)} in {first}, {tuple(b.shape)} in {other}"
            gap = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
            if not gap < tolerance:
                return f"{key} of {first} and of {other} differ by {gap:.1e}"
    return None


def reason(error: Exception) -> str:
    """Why a method has no figure, in a line."""
    if isinstance(error, Unavailable):
        return str(error)
    lines = str(error).splitlines()
    return f"failed: {type(error).__name__}" + (f": {lines[0][:200]}" if lines else "")


if __name__ == "__main__":
    main()
