"""An install succeeds with a compiler, without one, with one that fails; and `cumulant doctor` says how it went."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cumulant.kernels.native import targets

pytest.importorskip("setuptools", reason="a wheel is built with setuptools")
pytest.importorskip("typer", reason="install cumulant[cli]")
ROOT = Path(__file__).parents[3]
NATIVE = Path("cumulant", "kernels", "native")
NAMES = [target.library for target in targets.of_this_machine()]
FAST = {"CXXFLAGS": "-O0"}
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux" or not targets.runnable(), reason="runs on Linux, with AVX2 or aarch64"),
]
compiled = pytest.mark.skipif(not targets.compiler(), reason="install g++ to run")


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of what a build reads: it leaves files beside the sources."""
    copy = tmp_path / "source"
    left = shutil.ignore_patterns("*.so", "*.part", targets.MESSAGE, "__pycache__")
    shutil.copytree(ROOT / "cumulant", copy / "cumulant", ignore=left)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy / name)
    return copy


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in (targets.SWITCH, "CXX", "CXXFLAGS")}
    done = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def backend(hook: str, source: Path, **environment: str) -> Path:
    """What pip calls to build: build_wheel, build_editable, build_sdist. Returns the file."""
    code = f"from setuptools import build_meta; print(build_meta.{hook}('out'))"
    return source / "out" / run(sys.executable, "-c", code, cwd=source, **environment).split()[-1]


def unpack(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)
    return into


def doctor(installed: Path) -> dict:
    """What `cumulant doctor` says of the package in this directory."""
    code = "import json; from cumulant.doctor import as_tree, diagnose; print(json.dumps(as_tree(diagnose())))"
    found = json.loads(run(sys.executable, "-c", code, cwd=installed))
    assert str(installed) in found["versions"]["cumulant"]["value"]
    return found["kernel"]


def libraries(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / NATIVE).glob("*.so"))


@compiled
def test_a_wheel_has_every_instruction_set_of_its_machine_and_any_python(source, tmp_path):
    wheel = backend("build_wheel", source, **FAST)
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert not wheel.name.endswith("any.whl")
    installed = unpack(wheel, tmp_path / "installed")
    assert libraries(installed) == sorted(NAMES)
    left_out = {path.suffix for path in (installed / NATIVE).iterdir()} & {".h", ".cpp", ".txt", ".part"}
    assert not left_out
    assert doctor(installed)["serves"]["value"] == f"native {targets.runnable()[0].name}"


@compiled
def test_a_wheel_can_be_built_from_the_source_distribution(source, tmp_path):
    archive = backend("build_sdist", source)
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (copy,) = (tmp_path / "unpacked").iterdir()
    assert {path.name for path in (source / NATIVE).iterdir()} == {path.name for path in (copy / NATIVE).iterdir()}
    name = targets.runnable()[0].name
    installed = unpack(backend("build_wheel", copy, CUMULANT_NATIVE=name, **FAST), tmp_path / "installed")
    assert libraries(installed) == [targets.runnable()[0].library]


@compiled
def test_an_editable_install_compiles_for_this_processor_when_a_source_has_changed(source):
    library = source / NATIVE / targets.runnable()[0].library
    backend("build_editable", source, **FAST)
    assert libraries(source) == [library.name]
    assert doctor(source)["serves"]["value"] == f"native {targets.runnable()[0].name}"
    first = library.stat().st_mtime_ns
    backend("build_editable", source)
    assert library.stat().st_mtime_ns == first
    header = next((source / NATIVE).glob("*.h"), source / NATIVE / "kernel.cpp")
    os.utime(header, ns=(first + 10**9, first + 10**9))
    header.write_text("#error this header is broken\n")
    backend("build_editable", source)  # succeeds, and the outdated library is gone
    assert libraries(source) == []
    why = doctor(source)["why"]["value"]
    assert "#error this header is broken" in why
    assert "\n" not in why


@pytest.mark.parametrize(
    ("hook", "environment", "reason"),
    [
        ("build_wheel", {"CXX": "false"}, "not compiled: false: exit status 1"),
        ("build_wheel", {"CXX": "no-compiler"}, "not compiled: no C++ compiler found: no-compiler (from CXX)"),
        ("build_wheel", {"CUMULANT_NATIVE": "0"}, "not compiled: switched off by CUMULANT_NATIVE=0 when cumulant was"),
        ("build_wheel", {"CUMULANT_NATIVE": "sse2"}, "not compiled: CUMULANT_NATIVE: expected 0 or names among"),
        ("build_editable", {"CXX": "false"}, "not compiled: false: exit status 1"),
        ("build_editable", {"CUMULANT_NATIVE": "0"}, "not compiled: switched off by CUMULANT_NATIVE=0 when cumulant"),
    ],
)
def test_without_a_library_the_install_works_and_the_reason_is_known(source, tmp_path, hook, environment, reason):
    wheel = backend(hook, source, **environment)
    installed = source if hook == "build_editable" else unpack(wheel, tmp_path / "installed")
    assert libraries(installed) == []
    kernel = doctor(installed)
    assert kernel["serves"]["value"] == "torch"
    assert reason in kernel["why"]["value"]
    if "CUMULANT_NATIVE" in environment and hook == "build_wheel":
        assert wheel.name.endswith("-py3-none-any.whl")


@compiled
def test_the_next_build_that_succeeds_removes_the_message(source):
    backend("build_editable", source, CXX="false")
    assert (source / NATIVE / targets.MESSAGE).exists()
    backend("build_editable", source, **FAST)
    assert not (source / NATIVE / targets.MESSAGE).exists()
    backend("build_editable", source, CUMULANT_NATIVE="0")
    assert libraries(source) == []
