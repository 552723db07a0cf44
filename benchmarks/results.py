"""The figures of a run as plain data, ready for JSON."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import torch

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
    cores: int
    torch: str
    cumulant: str
    peers: dict[str, str]
    date: str


class Results(TypedDict):
    machine: Machine
    quick: bool
    cases: list[CaseResult]


def machine() -> Machine:
    """What the figures were taken on."""
    return Machine(
        cpu=_cpu(),
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
