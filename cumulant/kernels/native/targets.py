"""What the native kernel is compiled for and with: instruction sets, this processor, the compiler.

Only the standard library is imported: setup.py loads this file before cumulant can be imported.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).parent
MESSAGE = "build_message.txt"  # why the build left something out; beside the libraries
SWITCH = "CUMULANT_NATIVE"  # the environment variable: 0, or names of instruction sets
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-pthread")
AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})


class InstructionSet(NamedTuple):
    """A target of the compiler.

    name      as `cumulant_instruction_set()` of a library and CUMULANT_NATIVE spell it
    machine   the family of processors it belongs to
    features  what a processor must have, in the words of Linux
    flags     options of gcc and clang
    """

    name: str
    machine: str
    features: frozenset[str]
    flags: tuple[str, ...]

    @property
    def source(self) -> str:
        return self.name.replace("-", "_") + ".cpp"

    @property
    def library(self) -> str:
        """File name of the compiled library; it is loaded by ctypes and does not depend on a version of Python."""
        return "_" + self.name.replace("-", "_") + ".so"


# the best of a machine first
INSTRUCTION_SETS = (
    InstructionSet("x86-64-v4", "x86-64", AVX2 | AVX512, ("-march=x86-64-v4", "-mprefer-vector-width=512")),
    InstructionSet("x86-64-v3", "x86-64", AVX2, ("-march=x86-64-v3",)),
    InstructionSet("aarch64", "aarch64", frozenset(), ("-march=armv8-a",)),
)


def machine() -> str:
    """The family of this processor: "x86-64", "aarch64", or the words of the system for any other."""
    name = platform.machine().lower()
    if sys.maxsize < 2**32:
        return f"32-bit {name}"
    return {"x86_64": "x86-64", "amd64": "x86-64", "arm64": "aarch64"}.get(name, name)


@cache
def processor_features() -> frozenset[str]:
    """Instructions that processor and operating system offer, in the words of Linux; empty where they are unknown."""
    if sys.platform == "linux":
        lines = _processor_lines()
        return frozenset(lines.get("flags", lines.get("Features", "")).split())
    if sys.platform == "darwin":
        keys = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")
        return frozenset({"lzcnt": "abm"}.get(word, word) for key in keys for word in _sysctl(key).lower().split())
    return frozenset()


def processor_name() -> str:
    """The name of this processor, as far as the system knows it."""
    if sys.platform == "linux":
        name = _processor_lines().get("model name", "")
    elif sys.platform == "darwin":
        name = _sysctl("machdep.cpu.brand_string")
    else:
        name = platform.processor()
    return name or machine()


def _processor_lines() -> dict[str, str]:
    """What /proc/cpuinfo says of the first processor."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _sysctl(key: str) -> str:
    try:
        return subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def of_this_machine() -> tuple[InstructionSet, ...]:
    """Instruction sets of this family of processors, the best first, whether or not this one has them."""
    return tuple(target for target in INSTRUCTION_SETS if target.machine == machine())


def missing_features(target: InstructionSet) -> list[str]:
    """What this processor lacks to run code for ``target``."""
    return sorted(target.features - processor_features())


def runnable() -> tuple[InstructionSet, ...]:
    """Instruction sets that this processor has, the best first."""
    return tuple(target for target in of_this_machine() if not missing_features(target))


def compiler() -> list[str]:
    """The command of the C++ compiler: CXX if it is set, else the first that is installed; empty if there is none."""
    requested = shlex.split(os.environ.get("CXX", ""))
    if requested:
        return requested if shutil.which(requested[0]) else []
    return next(([name] for name in COMPILERS if shutil.which(name)), [])


def no_compiler() -> str:
    """The sentence for a compiler that is not there."""
    requested = shlex.split(os.environ.get("CXX", ""))
    return f"no C++ compiler found: {requested[0] + ' (from CXX)' if requested else COMPILERS[0]}"
