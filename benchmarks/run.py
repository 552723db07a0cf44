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
from benchmarks.measure import Quartiles
from benchmarks.results import CaseResult, Comparison, Figure, Measured, cores

REPOSITORY = Path(__file__).resolve().parents[1]
Progress = Callable[[str, float], None]  # what runs, and the part of a job done since the last call


@dataclass(frozen=True)
class Effort:
    """How long to measure, and where. ``source`` names the module whose ``catalogue`` the processes read."""

    quick: bool = False
    repeats: int = 7
    budget: float = 10.0
    launches: int = 3  # processes a memory figure is the median of
    deadline: float = 1800.0
    source: str = "benchmarks.cases"
    device: str = "cpu"


class WorkerDied(Exception):
    """The process ended without an answer, while ``method`` was starting (None: in the rounds)."""

    def __init__(self, text: str, method: str | None):
        super().__init__(text)
        self.method = method


@dataclass
class _Answers:
    """What the processes of one case have answered so far."""

    seconds: dict[str, Figure] = field(default_factory=dict)
    memory: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[tuple[str, str], Figure] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    problem: str | None = None


def jobs(case: Case, settings: Effort) -> int:
    """Processes that a case takes if none dies."""
    return bool(case.measured("time")) + settings.launches * len(case.measured("memory"))


def silent(label: str, done: float) -> None:
    """Progress that is not shown."""


def run(cases: Iterable[Case], settings: Effort, progress: Progress = silent) -> Iterator[CaseResult]:
    """Results as they come."""
    for case in cases:
        yield run_case(case, settings, progress)


def run_case(case: Case, settings: Effort, progress: Progress = silent) -> CaseResult:
    """Time first, then memory method by method."""
    answers = _Answers()
    if case.measured("time"):
        _take_time(case, settings, progress, answers)
    for name in case.measured("memory"):
        for _ in range(settings.launches):
            _take_memory(case, name, settings, progress, answers)
    return CaseResult(
        name=case.name,
        table=case.table,
        work=case.work,
        threads=case.threads or cores(),
        methods={name: _measured(name, answers) for name in case.methods},
        comparisons=[_compare(target, answers, settings.quick) for target in case.targets],
        problem=answers.problem,
    )


def _take_time(case: Case, settings: Effort, progress: Progress, answers: _Answers) -> None:
    """Again without the method that killed the process, while one does."""
    reported = 0.0
    while methods := [name for name in case.measured("time") if name not in answers.skipped]:

        def on_event(event: dict[str, Any]) -> None:
            nonlocal reported
            step = max(0.0, event.get("done", reported) - reported)
            reported += step
            progress(f"{case.name}: {event['method']}" if event.get("method") else f"{case.name}: time", step)

        try:
            answer = _launch(case, "time", methods, settings, on_event)
        except WorkerDied as death:
            if death.method is None:
                answers.problem = str(death)
                break
            answers.skipped[death.method] = str(death)
            continue
        answers.seconds = answer["seconds"]
        answers.ratios = {(a, b): figure for a, b, figure in answer["ratios"]}
        answers.skipped |= answer["skipped"]
        answers.problem = answer["problem"]
        break
    progress(f"{case.name}: time", 1 - reported)


def _take_memory(case: Case, name: str, settings: Effort, progress: Progress, answers: _Answers) -> None:
    label = f"{case.name}: memory of {name}"
    progress(label, 0)
    if name not in answers.skipped:
        try:
            answer = _launch(case, "memory", [name], settings, lambda event: None)
            answers.skipped |= answer["skipped"]
            if answer["extra_mib"] is not None:
                answers.memory.setdefault(name, []).append(answer["extra_mib"])
        except WorkerDied as death:
            answers.skipped[name] = str(death)
    progress(label, 1)


def _launch(
    case: Case, mode: str, methods: list[str], settings: Effort, on_event: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """One worker, from request to answer."""
    threads = case.threads or cores()
    request = {
        "source": settings.source,
        "case": case.name,
        "quick": settings.quick,
        "device": settings.device,
        "mode": mode,
        "methods": methods,
    }
    request |= {"threads": threads, "repeats": settings.repeats, "budget": settings.budget}
    command = [sys.executable, "-m", "benchmarks.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": _environment(threads)}
    method, answer = None, None
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
                method, answer = event.get("method", method), event.get("answer")
                on_event(event)
            process.wait()
        finally:
            timer.cancel()
            process.kill()
        if answer is None:
            log.seek(0)
            raise WorkerDied(_failure(process.returncode, log.read()), method)
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


def _failure(code: int, log: str) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    lines = [line for line in log.splitlines() if line.strip()]
    return f"the process failed: {lines[-1] if lines else f'exit status {code}'}"


def _measured(name: str, answers: _Answers) -> Measured:
    mib = answers.memory.get(name)
    return Measured(
        seconds=answers.seconds.get(name),
        extra_mib=_figure(Quartiles.of(mib)) if mib else None,
        skipped=answers.skipped.get(name),
    )


def _compare(target: Target, answers: _Answers, quick: bool) -> Comparison:
    figure = _figure_of(target, answers)
    judged = target.bound is not None and not quick
    met = None
    if judged and figure is not None:
        met = bool(figure["median"] <= (target.bound or 0)) and answers.problem is None
    elif judged and (answers.problem or answers.skipped.get(target.method, "").startswith(("failed", "the process"))):
        met = False
    return Comparison(
        method=target.method,
        peer=target.peer,
        quantity=target.quantity,
        bound=target.bound,
        faster=target.faster,
        tracks=target.tracks,
        figure=figure,
        met=met,
    )


def _figure_of(target: Target, answers: _Answers) -> Figure | None:
    if target.quantity == "time":
        return answers.ratios.get((target.method, target.peer or ""))
    mine, theirs = answers.memory.get(target.method), answers.memory.get(target.peer or "")
    if not mine or (target.peer is not None and not theirs):
        return None
    scale = Quartiles.of(theirs).median if theirs else 1.0
    return _figure(Quartiles.of(m / max(scale, 1 / 256) for m in mine))


def _figure(spread: Quartiles) -> Figure:
    return Figure(median=spread.median, low=spread.low, high=spread.high, count=spread.count)
