"""The native kernel without Python, under the sanitizers of the compiler: driver.cpp calls every entry point.

Vectors of 16 and 64 bytes are emulated where the processor has none, so that the code of every instruction set runs.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cumulant.kernels.native import targets

DRIVER = Path(__file__).with_name("driver.cpp")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not targets.compiler(), reason="install g++ to run"),
    pytest.mark.skipif(not targets.runnable(), reason="runs on processors with AVX2, and on aarch64"),
]


def build(source: Path, program: Path, sanitizers: str, *more: str) -> subprocess.CompletedProcess:
    flags = [*targets.FLAGS, *targets.runnable()[0].flags, "-g1", "-w", f"-fsanitize={sanitizers}"]
    command = [*targets.compiler(), *flags, "-fno-sanitize-recover=all", f"-I{targets.DIRECTORY}", *more]
    return subprocess.run([*command, source, "-o", program], capture_output=True, text=True)


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([program, *arguments], env=os.environ | OPTIONS, capture_output=True, text=True, timeout=1000)


def require(sanitizers: str, directory: Path) -> None:
    """Skip where the compiler has no runtime for these sanitizers, or where it cannot run."""
    trial = directory / "trial.cpp"
    trial.write_text("int main() { return 0; }\n")
    if build(trial, directory / "trial", sanitizers).returncode:
        pytest.skip(f"install the runtime libraries of -fsanitize={sanitizers} (with gcc: libasan, libubsan, libtsan)")
    if run(directory / "trial").returncode:
        pytest.skip(f"programs under -fsanitize={sanitizers} cannot run here: use a newer gcc, lower vm.mmap_rnd_bits")


@pytest.mark.parametrize(
    ("sanitizers", "flags", "runs"),
    [
        ("address", ["-O1"], [["numbers", "300"], ["threads"]]),
        ("undefined", ["-O1"], [["numbers", "300"], ["fork"]]),
        ("thread", ["-O1"], [["threads"]]),
        ("address", ["-O0", "-DVECTOR_BYTES=16"], [["numbers", "20"]]),
        ("address", ["-O0", "-DVECTOR_BYTES=64"], [["numbers", "20"]]),
    ],
    ids=["memory", "behaviour", "threads", "vectors-of-16-bytes", "vectors-of-64-bytes"],
)
def test_no_error_and_no_wrong_number(sanitizers, flags, runs, tmp_path):
    require(sanitizers, tmp_path)
    program = tmp_path / "driver"
    built = build(DRIVER, program, sanitizers, *flags)
    assert built.returncode == 0, built.stderr[-3000:]
    for arguments in runs:
        done = run(program, *arguments)
        assert done.returncode == 0, (arguments, done.stdout[-3000:], done.stderr[-5000:])
        assert f"{arguments[0]}: 0 failures" in done.stdout


@pytest.mark.skipif(not shutil.which(CROSS) or not shutil.which(EMULATOR), reason=f"install {CROSS} and {EMULATOR}")
def test_other_processors_in_an_emulator(tmp_path):
    """The code for aarch64, by a cross-compiler, as instructions of that processor: numbers and threads, not speed."""
    target = next(target for target in targets.INSTRUCTION_SETS if target.name == "aarch64")
    program = tmp_path / "driver"
    flags = [*targets.FLAGS, "-O2", *target.flags, "-w", "-static", f"-I{targets.DIRECTORY}"]
    built = subprocess.run([CROSS, *flags, DRIVER, "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    for arguments in (["numbers", "100"], ["threads"]):
        done = subprocess.run([EMULATOR, program, *arguments], capture_output=True, text=True, timeout=1000)
        assert done.returncode == 0, (arguments, done.stdout[-3000:], done.stderr[-5000:])
        assert f"{arguments[0]}: 0 failures (aarch64" in done.stdout
