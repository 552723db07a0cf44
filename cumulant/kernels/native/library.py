"""The compiled kernel for this processor: found, checked and loaded on first use, or the reason why there is none."""

from __future__ import annotations

import ctypes
import os
import struct
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cumulant.checks import sentence
from cumulant.kernels.native import targets
from cumulant.kernels.native.arguments import ENTRY_POINTS, Call
from cumulant.kernels.native.targets import MESSAGE, SWITCH, InstructionSet

ABI_VERSION = 3  # that of kernel.cpp; raise both when an argument or an entry point changes
ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
ELF_SEGMENT = struct.Struct("<IIQQQQQQ")
LOADED = 1  # the type of segments that are mapped into memory
STRINGS = 3  # the type of the section with the names of sections


class Library(NamedTuple):
    """A library that is loaded and of this version; `functions` has its entry points."""

    instruction_set: str
    path: Path
    functions: ctypes.CDLL


class Absence(NamedTuple):
    """Why a library does not serve; `fault` if there is one that should."""

    reason: str
    fault: bool = False


@cache
def library() -> Library | None:
    """The library for the best instruction set of this processor; None if the kernels in torch are to serve.

    CUMULANT_NATIVE=0 in the environment switches it off, CUMULANT_NATIVE=x86-64-v3 asks for this one. The first call
    decides. A library that is there and cannot be used is reported in one warning.
    """
    found = find()
    if isinstance(found, Library):
        return found
    if found.fault:
        message = f"the native kernel cannot be used, the slower kernels in torch serve: {found.reason}"
        warnings.warn(message, UserWarning, stacklevel=2)
    return None


def why_not() -> str:
    """One line that says why `library` is None; empty if it is not."""
    found = find()
    return found.reason if isinstance(found, Absence) else ""


@cache
def find() -> Library | Absence:
    """The library that serves, or the reason why none does."""
    requested = os.environ.get(SWITCH, "")
    if requested == "0":
        return Absence(f"switched off by {SWITCH}=0")
    names = [target.name for target in targets.of_this_machine()]
    if not names:
        return Absence(f"there is none for {targets.machine()} processors")
    if requested not in ("", "1", *names):
        expected = f"0 or one of {', '.join(names)}"
        return Absence(sentence(SWITCH, expected, requested, "Correct or unset it."), fault=True)
    absences, candidates = [], []
    for target in targets.of_this_machine():
        if requested in ("", "1", target.name):
            opened = examine(target)
            if isinstance(opened, Library):
                return opened
            absences.append(opened)
            candidates += [] if targets.missing_features(target) else [opened]
    # the fault of a library, or what became of the best one for this processor, or what it lacks for the simplest
    return [*(absence for absence in absences if absence.fault), *candidates, absences[-1]][0]


def examine(target: InstructionSet) -> Library | Absence:
    """Load the library for one instruction set, if this processor has it."""
    lacking = targets.missing_features(target)
    if lacking:
        return Absence(f"{target.name}: this processor has no {', '.join(lacking)}")
    path = targets.DIRECTORY / target.library
    if not path.exists():
        return Absence(f"{target.name}: not compiled: {_build_message(target)}")
    cut = incomplete(path)
    if cut:
        return Absence(f"{path}: {cut}. Install cumulant again.", fault=True)
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return Absence(f"cannot be loaded: {' '.join(str(error).split())}. Install cumulant again.", fault=True)
    return _checked(target, path, functions)


def _build_message(target: InstructionSet) -> str:
    """What the build said of this target and of all, in one line."""
    path = targets.DIRECTORY / MESSAGE
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    others = tuple(f"{other.name}: " for other in targets.INSTRUCTION_SETS if other != target)
    lines = [line.strip(" .") for line in text.splitlines() if line.strip() and not line.startswith(others)]
    return "; ".join(line.removeprefix(f"{target.name}: ") for line in lines) or "cumulant was installed without it"


def _checked(target: InstructionSet, path: Path, functions: ctypes.CDLL) -> Library | Absence:
    """The library, if it has every entry point and its own answers are those of this version and instruction set."""

    def refused(expected: str, got: object) -> Absence:
        return Absence(sentence(str(path), expected, got, "Install cumulant again."), fault=True)

    try:
        version = functions.cumulant_abi_version
        version.argtypes, version.restype = (), ctypes.c_int64
        if version() != ABI_VERSION:
            return refused(f"version {ABI_VERSION} of its interface", f"version {version()}")
        size, name = functions.cumulant_call_bytes, functions.cumulant_instruction_set
        for entry in ENTRY_POINTS:
            getattr(functions, f"cumulant_{entry}")
    except AttributeError as error:
        return refused("a library of this kernel", str(error).removeprefix(f"{path}: "))
    size.argtypes, size.restype = (), ctypes.c_int64
    if size() != ctypes.sizeof(Call):
        return refused(f"arguments of {ctypes.sizeof(Call)} bytes", f"{size()} bytes")
    name.argtypes, name.restype = (), ctypes.c_char_p
    compiled_for = (name() or b"").decode("ascii", "replace")
    if compiled_for != target.name:
        return refused(f"a library for {target.name}", compiled_for)
    return Library(target.name, path, functions)


def incomplete(path: Path) -> str:
    """What an ELF file lacks of its own table of contents; empty if nothing, or if it is no 64-bit ELF file.

    The loader trusts that table: a file that was cut short is mapped beyond its end, and the first touch there ends the
    process (SIGBUS). Any other kind of file the loader refuses by itself.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < ELF_HEADER.size:
        return ""
    fields = ELF_HEADER.unpack_from(data)
    segments_at, sections_at = fields[5:7]
    segment_size, segments, section_size, sections, names = fields[9:14]
    ends = [sections_at + section_size * sections, segments_at + segment_size * segments]
    if max(ends) <= len(data) and segment_size == ELF_SEGMENT.size:
        for index in range(segments):
            kind, _, offset, _, _, length, _, _ = ELF_SEGMENT.unpack_from(data, segments_at + index * segment_size)
            ends.append(offset + length if kind == LOADED else 0)
    if max(ends) > len(data):
        return f"cut short, {len(data)} bytes of {max(ends)}"
    named = names < sections and data[sections_at + section_size * names + 4] == STRINGS
    if sections and not named:
        return "damaged, its last bytes are not those that the compiler wrote"
    return ""
