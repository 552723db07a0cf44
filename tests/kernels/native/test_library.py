"""The library of the native kernel is found and checked before it is loaded; with any other file torch serves."""

import ctypes
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from cumulant.kernels.native import library, targets
from cumulant.kernels.native.arguments import ENTRY_POINTS, Call, LossCall

IDENTITY = """
#include <stdint.h>
extern "C" int64_t cumulant_abi_version(void) {{ return {version}; }}
extern "C" int64_t cumulant_call_bytes(void) {{ return {size}; }}
extern "C" int64_t cumulant_loss_call_bytes(void) {{ return {loss_size}; }}
extern "C" const char* cumulant_instruction_set(void) {{ return "{name}"; }}
"""
SOURCE = IDENTITY + "".join(f'extern "C" int64_t cumulant_{name}(void*) {{{{ return 0; }}}}\n' for name in ENTRY_POINTS)
SIZE, LOSS_SIZE = ctypes.sizeof(Call), ctypes.sizeof(LossCall)
SWITCH = targets.SWITCH
compiled = pytest.mark.skipif(not targets.compiler(), reason="install g++ to run")
native = pytest.mark.skipif(not targets.runnable(), reason="runs on processors with AVX2, and on aarch64")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty directory in which libraries are looked for, and nothing remembered."""
    monkeypatch.setattr(targets, "DIRECTORY", tmp_path)
    monkeypatch.delenv(SWITCH, raising=False)
    clear()
    yield tmp_path
    clear()


def clear():
    library.find.cache_clear()
    library.library.cache_clear()


def build(
    directory, target=None, source=SOURCE, version=library.ABI_VERSION, size=SIZE, loss_size=LOSS_SIZE, name=None
):
    """A library with nothing but an identity, in the file of ``target``."""
    target = target or targets.runnable()[0]
    path = directory / target.library
    text = source.format(version=version, size=size, loss_size=loss_size, name=name or target.name)
    command = [*targets.compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", path]
    subprocess.run(command, input=text, text=True, check=True)
    return path


def refused() -> str:
    """The reason, once the one warning was seen."""
    with pytest.warns(UserWarning, match="the slower kernels in torch serve") as caught:
        library.library()
    assert library.library() is None  # and no second warning, which would be an error
    reason = library.why_not()
    assert [reason in str(warning.message) for warning in caught] == [True]
    assert "\n" not in reason
    return reason


def absent() -> str:
    """The reason of an absence that is nobody's fault: no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.library() is None
    reason = library.why_not()
    assert reason
    assert "\n" not in reason
    return reason


@native
@compiled
def test_the_library_of_this_processor_is_loaded(directory):
    path = build(directory)
    opened = library.library()
    assert opened.instruction_set == targets.runnable()[0].name
    assert opened.path == path
    assert opened.functions.cumulant_abi_version() == library.ABI_VERSION
    assert library.why_not() == ""
    assert library.library() is opened


@native
def test_without_a_library_the_message_of_the_build_is_the_reason(directory):
    name = targets.runnable()[0].name
    other = next(target.name for target in targets.INSTRUCTION_SETS if target.name != name)
    assert absent() == f"{name}: not compiled: cumulant was installed without it"
    clear()
    (directory / targets.MESSAGE).write_text(
        f"{other}: g++: what?\n{name}: g++: kernel.cpp:1: error: no\nsecond line.\n"
    )
    assert absent() == f"{name}: not compiled: g++: kernel.cpp:1: error: no; second line"


@native
@compiled
@pytest.mark.parametrize(("switch", "serves"), [("0", False), ("1", True), ("", True)])
def test_the_switch(directory, monkeypatch, switch, serves):
    build(directory)
    monkeypatch.setenv(SWITCH, switch)
    assert (library.library() is not None) == serves
    if not serves:
        assert library.why_not() == "switched off by CUMULANT_NATIVE=0"


@native
def test_an_unknown_switch_lists_the_known_ones(directory, monkeypatch):
    monkeypatch.setenv(SWITCH, "x86-64-v9")
    names = ", ".join(target.name for target in targets.of_this_machine())
    assert refused() == f"CUMULANT_NATIVE: expected 0 or one of {names}, got x86-64-v9. Correct or unset it."


@compiled
def test_the_best_instruction_set_is_taken_unless_another_is_requested(directory, monkeypatch):
    """The libraries contain no instructions of their sets, so that any processor may load them."""
    monkeypatch.setattr(targets, "machine", lambda: "x86-64")
    monkeypatch.setattr(targets, "processor_features", lambda: targets.AVX2 | targets.AVX512)
    for target in targets.of_this_machine():
        build(directory, target)
    assert library.library().instruction_set == "x86-64-v4"
    clear()
    monkeypatch.setenv(SWITCH, "x86-64-v3")
    assert library.library().instruction_set == "x86-64-v3"


@compiled
def test_no_library_is_loaded_that_the_processor_cannot_run(directory, monkeypatch):
    monkeypatch.setattr(targets, "machine", lambda: "x86-64")
    monkeypatch.setattr(targets, "processor_features", lambda: targets.AVX2)
    for target in targets.of_this_machine():
        build(directory, target)
    assert library.library().instruction_set == "x86-64-v3"
    clear()
    monkeypatch.setenv(SWITCH, "x86-64-v4")
    assert absent() == "x86-64-v4: this processor has no avx512bw, avx512cd, avx512dq, avx512f, avx512vl"
    clear()
    monkeypatch.delenv(SWITCH)
    monkeypatch.setattr(targets, "processor_features", lambda: targets.AVX2 - {"avx2", "fma"})
    assert absent() == "x86-64-v3: this processor has no avx2, fma"


def test_a_machine_without_a_kernel(directory, monkeypatch):
    monkeypatch.setattr(targets, "machine", lambda: "riscv64")
    assert absent() == "there is none for riscv64 processors"


@native
@compiled
def test_a_library_of_another_version_is_refused(directory):
    path = build(directory, version=7)
    expected = f"version {library.ABI_VERSION} of its interface, got version 7"
    assert refused() == f"{path}: expected {expected}. Install cumulant again."


@native
@compiled
def test_a_library_for_another_instruction_set_is_refused(directory):
    build(directory, name="x86-64-v9")
    assert f"expected a library for {targets.runnable()[0].name}, got x86-64-v9. Install" in refused()


@native
@compiled
@pytest.mark.parametrize(
    ("source", "missing"), [("int something_else;", "cumulant_abi_version"), (IDENTITY, "cumulant_forward")]
)
def test_a_library_without_the_functions_is_refused(directory, source, missing):
    path = build(directory, source=source)
    reason = refused()
    assert reason.startswith(f"{path}: expected a library of this kernel, got ")
    assert missing in reason


@native
@compiled
@pytest.mark.parametrize(("name", "bytes_"), [("size", SIZE), ("loss_size", LOSS_SIZE)])
def test_a_library_with_other_arguments_is_refused(directory, name, bytes_):
    path = build(directory, **{name: bytes_ - 8})
    got = f"expected arguments of {bytes_} bytes, got {bytes_ - 8} bytes. Install cumulant again."
    assert refused() == f"{path}: {got}"


@native
@compiled
def test_a_broken_library_gives_way_to_the_next(directory, monkeypatch):
    monkeypatch.setattr(targets, "machine", lambda: "x86-64")
    monkeypatch.setattr(targets, "processor_features", lambda: targets.AVX2 | targets.AVX512)
    better, other = targets.of_this_machine()
    (directory / better.library).write_bytes(b"broken")
    build(directory, other)
    assert library.library().instruction_set == "x86-64-v3"


@native
@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not a library", b"\x7fELF\x02\x01" + bytes(5000)], ids=len)
def test_a_file_that_is_no_library_is_refused(directory, content):
    (directory / targets.runnable()[0].library).write_bytes(content)
    assert "Install cumulant again." in refused()


@native
def test_a_file_that_cannot_be_read_is_refused(directory):
    (directory / targets.runnable()[0].library).mkdir()
    assert "cannot be read" in refused()


@native
@compiled
@pytest.mark.skipif(sys.platform != "linux", reason="ELF files are those of Linux")
def test_a_library_that_was_cut_short_is_never_loaded(directory):
    """In a process of its own, which the loader would end by SIGBUS."""
    path = build(directory)
    code = f"""
import sys
from cumulant.kernels.native import library, targets
from cumulant.kernels.native.arguments import ENTRY_POINTS, Call
from pathlib import Path
path = Path({str(path)!r})
targets.DIRECTORY = path.parent
whole = path.read_bytes()
for size in [*range(0, len(whole), 61), len(whole) - 1]:
    for rest in (b"", bytes(len(whole) - size)):  # a file system may fill up with zeros
        path.unlink()
        path.write_bytes(whole[:size] + rest)
        if size < len(whole) - 64:
            opened = library.examine(targets.runnable()[0])
            assert isinstance(opened, library.Absence) and opened.fault, (size, len(rest))
path.unlink()
path.write_bytes(whole)
assert isinstance(library.examine(targets.runnable()[0]), library.Library)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_processor_has_what_torch_sees():
    names = [target.name for target in targets.runnable()]
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert "x86-64-v3" in names
    assert targets.processor_name()


def test_the_compiler_is_the_one_that_is_requested(monkeypatch):
    monkeypatch.setenv("CXX", "ccache-of-nobody g++")
    assert targets.compiler() == []
    assert targets.no_compiler() == "no C++ compiler found: ccache-of-nobody (from CXX)"
    monkeypatch.setenv("CXX", f"{sys.executable} -I")
    assert targets.compiler() == [sys.executable, "-I"]
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert targets.compiler() == []
    assert targets.no_compiler() == "no C++ compiler found: g++"


def test_every_instruction_set_has_its_source():
    for target in targets.INSTRUCTION_SETS:
        lines = (targets.DIRECTORY / target.source).read_text().splitlines()
        assert lines[0].startswith(f"// The kernel for {target.name}")
        assert lines[1:] == ['#include "kernel.cpp"']
