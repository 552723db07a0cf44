"""Cases one after another, each in fresh processes, so that neither thread settings nor memory leak between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Target
from benchmarks.measure import Spread
from benchmarks.results import CaseResult, Comparison, Figure, Side, cores

REPOSITORY = Path(__file__).resolve().parents[1]
Progress = Callable[[str, float], None]  # what runs, and the part of a job done since the last call


@dataclass(frozen=True)
class Settings:
    """How long to measure. ``source`` names the module whose ``catalogue`` the processes read."""

    quick: bool = False
    repeats: int = 7
    budget: float = 20.0
    launches: int = 3  # processes a memory figure is the median of
    deadline: float = 1800.0
    source: str = "benchmarks.cases"


class Died(Exception):
    """The process ended without an answer, while ``side`` was starting (None: in the rounds)."""

    def __init__(self, text: str, side: str | None):
        super().__init__(text)
        self.side = side


@dataclass
class _Found:
    """What the processes of one case have answered so far."""

    seconds: dict[str, Figure] = field(default_factory=dict)
    memory: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[tuple[str, str], Figure] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    problem: str | None = None


def jobs(case: Case, settings: Settings) -> int:
    """Processes that a case takes if none dies."""
    return bool(case.measured("time")) + settings.launches * len(case.measured("memory"))


def silent(label: str, done: float) -> None:
    """Progress that nobody watches."""


def run(cases: Iterable[Case], settings: Settings, progress: Progress = silent) -> Iterator[CaseResult]:
    """Results as they come."""
    for case in cases:
        yield run_case(case, settings, progress)


def run_case(case: Case, settings: Settings, progress: Progress = silent) -> CaseResult:
    """Time first, then memory side by side."""
    found = _Found()
    if case.measured("time"):
        _take_time(case, settings, progress, found)
    for name in case.measured("memory"):
        for _ in range(settings.launches):
            _take_memory(case, name, settings, progress, found)
    return CaseResult(
        name=case.name,
        table=case.table,
        work=case.work,
        threads=case.threads or cores(),
        sides={name: _side(name, found) for name in case.sides},
        comparisons=[_compare(target, found, settings.quick) for target in case.targets],
        problem=found.problem,
    )


def _take_time(case: Case, settings: Settings, progress: Progress, found: _Found) -> None:
    """Again without the side that killed the process, while one does."""
    told = 0.0
    while sides := [name for name in case.measured("time") if name not in found.skipped]:

        def hear(event: dict[str, Any]) -> None:
            nonlocal told
            step = max(0.0, event.get("done", told) - told)
            told += step
            progress(f"{case.name}: {event['side']}" if event.get("side") else f"{case.name}: time", step)

        try:
            answer = _launch(case, "time", sides, settings, hear)
        except Died as death:
            if death.side is None:
                found.problem = str(death)
                break
            found.skipped[death.side] = str(death)
            continue
        found.seconds = answer["seconds"]
        found.ratios = {(a, b): figure for a, b, figure in answer["ratios"]}
        found.skipped |= answer["skipped"]
        found.problem = answer["problem"]
        break
    progress(f"{case.name}: time", 1 - told)


def _take_memory(case: Case, name: str, settings: Settings, progress: Progress, found: _Found) -> None:
    label = f"{case.name}: memory of {name}"
    progress(label, 0)
    if name not in found.skipped:
        try:
            answer = _launch(case, "memory", [name], settings, lambda event: None)
            found.skipped |= answer["skipped"]
            if answer["extra_mib"] is not None:
                found.memory.setdefault(name, []).append(answer["extra_mib"])
        except Died as death:
            found.skipped[name] = str(death)
    progress(label, 1)


def _launch(
    case: Case, mode: str, sides: list[str], settings: Settings, hear: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """One worker, from request to answer."""
    threads = case.threads or cores()
    request = {"source": settings.source, "case": case.name, "quick": settings.quick, "mode": mode, "sides": sides}
    request |= {"threads": threads, "repeats": settings.repeats, "budget": settings.budget}
    command = [sys.executable, "-m", "benchmarks.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": _environment(threads)}
    side, answer = None, None
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log, **pipes) as process:
        timer = threading.Timer(settings.deadline, process.kill)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            for line in process.stdout:
                event = json.loads(line)
                side, answer = event.get("side", side), event.get("answer")
                hear(event)
            process.wait()
        finally:
            timer.cancel()
            process.kill()
        if answer is None:
            log.seek(0)
            raise Died(_last_words(process.returncode, log.read()), side)
    return answer


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # cached code may have been made for another number of threads
    }


def _last_words(code: int, log: str) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    lines = [line for line in log.splitlines() if line.strip()]
    return f"the process failed: {lines[-1] if lines else f'exit status {code}'}"


def _side(name: str, found: _Found) -> Side:
    mib = found.memory.get(name)
    return Side(
        seconds=found.seconds.get(name),
        extra_mib=_figure(Spread.of(mib)) if mib else None,
        skipped=found.skipped.get(name),
    )


def _compare(target: Target, found: _Found, quick: bool) -> Comparison:
    figure = _figure_of(target, found)
    judged = target.bound is not None and not quick
    met = None
    if judged and figure is not None:
        met = bool(figure["median"] <= (target.bound or 0)) and found.problem is None
    elif judged and (found.problem or found.skipped.get(target.side, "").startswith(("failed", "the process"))):
        met = False
    return Comparison(
        side=target.side,
        peer=target.peer,
        quantity=target.quantity,
        bound=target.bound,
        faster=target.faster,
        tracks=target.tracks,
        figure=figure,
        met=met,
    )


def _figure_of(target: Target, found: _Found) -> Figure | None:
    if target.quantity == "time":
        return found.ratios.get((target.side, target.peer or ""))
    mine, theirs = found.memory.get(target.side), found.memory.get(target.peer or "")
    if not mine or (target.peer is not None and not theirs):
        return None
    scale = Spread.of(theirs).median if theirs else 1.0
    return _figure(Spread.of(m / max(scale, 1 / 256) for m in mine))


def _figure(spread: Spread) -> Figure:
    return Figure(median=spread.median, low=spread.low, high=spread.high, count=spread.count)
