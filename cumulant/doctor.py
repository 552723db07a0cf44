"""`cumulant doctor`: what is installed, which kernel serves, and what to do about what is missing."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import cumulant
from cumulant.extras import install
from cumulant.files import versions
from cumulant.kernels.native import library, targets

CORE = ("torch", "numpy", "jaxtyping")
FOR_DEVELOPERS = {"bench", "docs", "lint", "test"}  # extras that are not listed
SECONDS = 20  # patience with other programs
TRIAL = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


class Finding(NamedTuple):
    """One line of the diagnosis; `advice` where something can be done."""

    section: str
    name: str
    value: str
    advice: str = ""


def doctor_command(as_json: bool = False) -> None:
    """Print the diagnosis, as a table or as JSON."""
    findings = diagnose()
    screen = Console()
    if as_json:
        screen.print_json(json.dumps(as_tree(findings), ensure_ascii=False))
    else:
        screen.print(_table(findings))


def diagnose() -> list[Finding]:
    """Versions, extras, processor, kernel, compiler."""
    return [*_versions(), *_extras(), *_processor(), *_kernel(), *_compiler()]


def as_tree(findings: list[Finding]) -> dict[str, dict[str, dict[str, str]]]:
    """section → name → value and advice.

    >>> as_tree([Finding("versions", "torch", "2.13.0")])
    {'versions': {'torch': {'value': '2.13.0', 'advice': ''}}}
    """
    return {
        section: {finding.name: {"value": finding.value, "advice": finding.advice} for finding in lines}
        for section, lines in groupby(findings, key=lambda finding: finding.section)
    }


def _table(findings: list[Finding]) -> Table:
    """A heading for each section; advice stands below what it is about."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, lines in groupby(findings, key=lambda finding: finding.section):
        table.add_row(Text(section, "bold"), "")
        for finding in lines:
            value = Text(finding.value)
            if finding.advice:
                value.append(f"\n→ {finding.advice}", "yellow")
            table.add_row(Text(f"  {finding.name}"), value)
    return table


def _versions() -> list[Finding]:
    found = {**versions(*CORE), "cumulant": f"{cumulant.__version__}  ({Path(cumulant.__file__).parent})"}
    return [Finding("versions", name, found[name]) for name in ("cumulant", "python", *CORE)]


def _extras() -> list[Finding]:
    """The packages of each extra, with the command that installs those that are missing."""
    findings = []
    for extra, packages in extra_packages().items():
        missing = [name for name in packages if _version(name) is None]
        value = ", ".join(f"{name} {_version(name) or 'missing'}" for name in packages)
        advice = install(extra) if missing else ""
        findings.append(Finding("extras", extra, value, advice))
    return findings


def extra_packages() -> dict[str, list[str]]:
    """extra → names of its packages, as the installed metadata of cumulant has them."""
    try:
        lines = requires("cumulant") or []
    except PackageNotFoundError:
        lines = []
    found: dict[str, list[str]] = {}
    for line in lines:
        package, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        bundle = package and package[0] == "cumulant"  # an extra of extras
        if package and not bundle and extra and extra[1] not in FOR_DEVELOPERS:
            found.setdefault(extra[1], []).append(package[0])
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> list[Finding]:
    names = [target.name for target in targets.runnable()]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"{torch.get_num_threads()} of torch, {usable} processors"
    found = {
        "name": targets.processor_name(),
        "instructions": ", ".join(names) or f"{targets.machine()}, none that the native kernel is compiled for",
        "threads": threads,
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use",
    }
    return [Finding("processor", name, value) for name, value in found.items()]


def _kernel() -> list[Finding]:
    """Which kernel serves and why, then each library of this machine."""
    switch = os.environ.get(targets.SWITCH, "")
    findings = [Finding("kernel", targets.SWITCH, switch)] if switch else []
    fatal = {target.name: end for target in targets.runnable() if (end := _trial(targets.DIRECTORY / target.library))}
    if fatal:  # not to be loaded into this process
        advice = f"Install cumulant again; until then set {targets.SWITCH}=0."
        return [*findings, *(Finding("kernel", name, end, advice) for name, end in fatal.items())]
    found = library.find()
    if isinstance(found, library.Library):
        findings += [Finding("kernel", "serves", f"native {found.instruction_set}")]
    else:
        findings += [Finding("kernel", "serves", "torch"), Finding("kernel", "why", found.reason, _advice(found))]
    for target in targets.of_this_machine():
        opened = library.examine(target)
        if isinstance(opened, library.Library):
            findings.append(Finding("kernel", target.name, str(opened.path), _outdated(opened.path)))
        else:
            findings.append(Finding("kernel", target.name, opened.reason.removeprefix(f"{target.name}: ")))
    return findings


def _advice(absence: library.Absence) -> str:
    """What brings the native kernel back, if anything can and the reason does not say it."""
    if os.environ.get(targets.SWITCH) == "0":
        return f"Unset {targets.SWITCH}."
    if absence.fault or not targets.runnable():
        return ""
    if not targets.compiler():
        return "Install g++ (apt install g++, dnf install gcc-c++, xcode-select --install), then cumulant again."
    return f"Install cumulant again, without {targets.SWITCH}=0, where gcc 11 or clang 12 or later is found."


def _outdated(path: Path) -> str:
    """What to do if a source beside the library, as there is in a clone, was changed after it was compiled."""
    sources = [*path.parent.glob("*.h"), *path.parent.glob("*.cpp")]
    newer = [source.name for source in sources if source.stat().st_mtime > path.stat().st_mtime]
    return f"Older than {', '.join(sorted(newer))}: run make test, or setup.py build_ext --inplace." if newer else ""


def _trial(path: Path) -> str:
    """How a process of its own ends that loads the library, if by a signal; empty if it lives."""
    if not path.exists() or library.incomplete(path):  # the latter is never loaded
        return ""
    try:
        command = [sys.executable, "-I", "-S", "-c", TRIAL, str(path)]
        code = subprocess.run(command, capture_output=True, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        return f"a process that loaded {path} did not end"
    return f"a process that loaded {path} was ended by signal {-code}" if code < 0 else ""


def _compiler() -> list[Finding]:
    command = targets.compiler()
    if not command:
        return [Finding("compiler", "C++", targets.no_compiler())]
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=SECONDS)
        first = run.stdout.partition("\n")[0] or f"exit status {run.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        first = f"cannot be run: {error}"
    return [Finding("compiler", "C++", f"{shlex.join(command)}: {first}")]
