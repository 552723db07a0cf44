"""Compiles the native kernel; without a compiler, or if it fails, cumulant is installed all the same.

The reason is then written to build_message.txt beside the libraries, where `cumulant doctor` finds it. A wheel has a
library for every instruction set of its machine, an editable install only the best that this processor has.

    CUMULANT_NATIVE=0                     compile nothing
    CUMULANT_NATIVE=x86-64-v4,x86-64-v3   compile just these
    CXX, CXXFLAGS                         the compiler, and flags that go after ours
"""

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

NATIVE = Path("cumulant", "kernels", "native")  # below the directory of this file, in which builds run
ERROR_LINES = 3  # so many lines of a compiler's errors go into the message

spec = importlib.util.spec_from_file_location("targets", NATIVE / "targets.py")
assert spec is not None
assert spec.loader is not None
targets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(targets)


def choose(host_only: bool) -> tuple[tuple, str]:
    """The instruction sets to compile for, and the reason if there are none."""
    requested = os.environ.get(targets.SWITCH, "")
    known = {target.name: target for target in targets.of_this_machine()}
    if requested == "0":
        return (), f"switched off by {targets.SWITCH}=0 when cumulant was installed. Install it again without that."
    if os.name != "posix":
        return (), f"it is compiled by gcc or clang on Linux and macOS, not on {sys.platform}."
    if not known:
        return (), f"there is none for {targets.machine()} processors."
    if requested not in ("", "1"):
        names = requested.split(",")
        if not set(names) <= known.keys():
            return (), f"{targets.SWITCH}: expected 0 or names among {', '.join(known)}, got {requested}. Correct it."
        return tuple(known[name] for name in names), ""
    if not host_only:
        return tuple(known.values()), ""
    best = targets.runnable()[:1]
    return best, "" if best else f"this processor has no {', '.join(targets.missing_features([*known.values()][-1]))}."


def compile_all(directory: Path, chosen: Sequence, reason: str, force: bool) -> str:
    """Compile into ``directory``; libraries that were not chosen or failed are removed, and the reason is left there.

    Returns the reason, empty if all went well.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for target in targets.INSTRUCTION_SETS:
        if target not in chosen:
            (directory / target.library).unlink(missing_ok=True)
    with ThreadPoolExecutor() as pool:
        failures = list(pool.map(lambda target: compile_one(directory / target.library, target, force), chosen))
    reason = reason or "\n".join(dict.fromkeys(failure for failure in failures if failure))
    message = directory / targets.MESSAGE
    if reason:
        message.write_text(reason + "\n", encoding="utf-8")
    else:
        message.unlink(missing_ok=True)
    return reason


def compile_one(library: Path, target, force: bool) -> str:
    """Compile for one instruction set, if a source is newer than its library; the reason if that fails."""
    sources = [*sorted(NATIVE.glob("*.h")), *sorted(NATIVE.glob("*.cpp")), NATIVE / "targets.py", "setup.py"]
    other_compiler = any(name in os.environ for name in ("CXX", "CXXFLAGS"))
    if library.exists() and not (force or other_compiler or newer_group(sources, library)):
        return ""
    library.unlink(missing_ok=True)
    compiler = targets.compiler()
    if not compiler:
        return targets.no_compiler()
    draft = library.with_suffix(".part")  # whoever loads the library meanwhile sees the whole file or none
    more = shlex.split(os.environ.get("CXXFLAGS", ""))
    command = [*compiler, *targets.FLAGS, *target.flags, *more, "-shared", "-fPIC", NATIVE / target.source, "-o", draft]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode == 0:
            draft.replace(library)
            return ""
    except OSError as error:
        return f"{target.name}: {compiler[0]}: {error.strerror}"
    finally:
        draft.unlink(missing_ok=True)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines or [f"exit status {done.returncode}"]
    return f"{target.name}: {shlex.join(compiler)}: " + "; ".join(errors[:ERROR_LINES])


class BuildNative(build_ext):
    """Calls the compiler itself: with our flags alone, not with those that Python was compiled with."""

    def run(self) -> None:
        directory = NATIVE if self.inplace else Path(self.build_lib, NATIVE)
        reason = compile_all(directory, *choose(host_only=bool(self.inplace)), force=bool(self.force))
        if reason:
            self.warn(f"the native kernel is left out, the kernels in torch serve: {reason}")
        built = {file.stem for file in directory.glob("*.so")}
        self.extensions = [extension for extension in self.extensions if extension.name.rpartition(".")[2] in built]

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class BuildPython(build_py):
    """Where there is nothing to compile, the reason is left all the same."""

    def run(self) -> None:
        super().run()
        if not self.distribution.has_ext_modules():
            directory = NATIVE if self.editable_mode else Path(self.build_lib, NATIVE)
            compile_all(directory, *choose(host_only=True), force=False)


class Wheel(bdist_wheel):
    """The libraries use nothing of Python: a wheel serves every version of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def extension(target) -> Extension:
    sources = [path.as_posix() for pattern in ("*.h", "*.cpp") for path in sorted(NATIVE.glob(pattern))]
    name = ".".join([*NATIVE.parts, Path(target.library).stem])
    return Extension(name, [(NATIVE / target.source).as_posix()], depends=sources, language="c++", optional=True)


setup(
    ext_modules=[extension(target) for target in choose(host_only=False)[0]],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": Wheel},
)
