"""The figures of a run as plain data, ready for JSON."""

from __future__ import annotations

import datetime
import os
from importlib import metadata
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import torch

from benchmarks.bounds import instruction_set
from cumulant.kernels.native.targets import processor_name

PEERS = ("pykeops", "pytorch-metric-learning", "filterpy")


class Figure(TypedDict):
    """A median with its quartiles."""

    median: float
    low: float
    high: float
    count: int


class Measured(TypedDict):
    seconds: Figure | None
    extra_mib: Figure | None
    skipped: str | None  # why there is no figure


class Comparison(TypedDict):
    method: str
    peer: str | None
    quantity: Literal["time", "memory"]
    bound: float | None
    faster: bool
    tracks: NotRequired[int]  # 1 where it is missing
    figure: Figure | None
    met: bool | None  # None: no bound, or nothing to judge


class CaseResult(TypedDict):
    name: str
    table: str
    work: str
    threads: int
    methods: dict[str, Measured]
    comparisons: list[Comparison]
    problem: str | None  # methods that disagree, or a process that died


class Machine(TypedDict):
    cpu: str
    instruction_set: NotRequired[str | None]  # that of the native kernel; None: the kernels in torch served
    cores: int
    device: NotRequired[str]  # what was measured where it is not the processor
    torch: str
    cumulant: str
    peers: dict[str, str]
    date: str


class Results(TypedDict):
    machine: Machine
    quick: bool
    cases: list[CaseResult]


def machine(device: str = "cpu") -> Machine:
    """What the figures were taken on."""
    there = {} if device == "cpu" else {"device": torch.cuda.get_device_name(torch.device(device))}
    return Machine(
        **there,
        cpu=_cpu(),
        instruction_set=instruction_set(),
        cores=cores(),
        torch=torch.__version__,
        cumulant=_version("cumulant") or "not installed",
        peers={name: version for name in PEERS if (version := _version(name))},
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    """The name of the processor; under Linux on x86 with its family and model, since virtual machines hide the name."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        first = ""
    numbers = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    family, model = numbers.get("cpu family"), numbers.get("model")
    return processor_name() + (f" (family {family}, model {model})" if family and model else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
