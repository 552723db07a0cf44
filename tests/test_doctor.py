"""`cumulant doctor` says what is installed, which kernel serves, why, and what to do; it never fails."""

import json
import os
import re
import shutil
import subprocess

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("typer.testing")

import torch  # noqa: E402

from cumulant import __version__, cli, doctor  # noqa: E402
from cumulant.extras import install  # noqa: E402
from cumulant.kernels.native import library, targets  # noqa: E402
from tests.kernels.native.test_library import build  # noqa: E402

native = pytest.mark.skipif(not targets.runnable(), reason="runs on processors with AVX2, and on aarch64")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty directory in which libraries are looked for, and nothing remembered."""
    monkeypatch.setattr(targets, "DIRECTORY", tmp_path)
    monkeypatch.delenv(targets.SWITCH, raising=False)
    library.find.cache_clear()
    yield tmp_path
    library.find.cache_clear()


def run(*arguments: str) -> str:
    found = testing.CliRunner().invoke(cli.application(), [*arguments], env={"COLUMNS": "400"})
    assert found.exit_code == 0, found.output
    return found.output


def tree() -> dict:
    return json.loads(run("doctor", "--json"))


def test_the_version():
    assert run("--version") == f"cumulant {__version__}\n"


def test_it_lists_versions_processor_and_compiler(monkeypatch):
    found = tree()
    assert list(found) == ["versions", "extras", "processor", "kernel", "compiler"]
    assert found["versions"]["torch"]["value"] == torch.__version__
    assert found["versions"]["cumulant"]["value"].startswith(__version__)
    assert found["processor"]["name"]["value"] == targets.processor_name()
    assert re.match(rf"{torch.get_num_threads()} of torch, \d+ processors", found["processor"]["threads"]["value"])
    text = run("doctor")
    for section, lines in found.items():
        assert re.search(rf"^{section}\s*$", text, re.M)
        for name, line in lines.items():
            assert re.search(rf"^  {re.escape(name)} +{re.escape(line['value'])}", text, re.M)


def test_a_missing_package_has_the_command_that_installs_it(monkeypatch):
    requirements = ['alpha>=1; extra == "first"', 'beta; extra == "first"', 'gamma; extra == "second"', "torch>=2"]
    requirements += ['delta; extra == "test"']
    monkeypatch.setattr(doctor, "requires", lambda package: requirements)
    installed = {"alpha": "1.5", "gamma": "3.0"}

    def version(package: str) -> str:
        if package not in installed:
            raise doctor.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(doctor, "version", version)
    assert tree()["extras"] == {
        "first": {"value": "alpha 1.5, beta missing", "advice": install("first")},
        "second": {"value": "gamma 3.0", "advice": ""},
    }
    assert f"→ {install('first')}" in run("doctor")


def test_without_metadata_there_are_no_extras(monkeypatch):
    def absent(package: str) -> list[str]:
        raise doctor.PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "requires", absent)
    assert "extras" not in tree()


@native
def test_without_a_library_torch_serves_and_the_build_says_why(directory):
    (directory / targets.MESSAGE).write_text("no C++ compiler found: g++\n")
    kernel = tree()["kernel"]
    assert kernel["serves"]["value"] == "torch"
    assert kernel["why"]["value"].endswith("not compiled: no C++ compiler found: g++")
    assert kernel["why"]["advice"].startswith("Install ")


@native
def test_without_a_compiler_it_says_how_to_install_one(directory, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = tree()
    assert found["compiler"]["C++"]["value"] == "no C++ compiler found: g++"
    assert "apt install g++" in found["kernel"]["why"]["advice"]


@native
def test_a_broken_library_is_named(directory):
    path = directory / targets.runnable()[0].library
    path.write_bytes(b"\x7fELF\x02\x01" + bytes(40) + b"\xff" * 30)
    kernel = tree()["kernel"]
    assert kernel["serves"]["value"] == "torch"
    assert kernel["why"]["value"].startswith(f"{path}: cut short")


@native
@pytest.mark.skipif(not targets.compiler(), reason="install g++ to run")
def test_a_library_that_ends_the_process_is_not_loaded_into_this_one(directory):
    path = directory / targets.runnable()[0].library
    source = "#include <stdlib.h>\n__attribute__((constructor)) static void die() { abort(); }\n"
    command = [*targets.compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", path]
    subprocess.run(command, input=source, text=True, check=True)
    kernel = tree()["kernel"]
    assert kernel[targets.runnable()[0].name]["value"] == f"a process that loaded {path} was ended by signal 6"
    assert "CUMULANT_NATIVE=0" in kernel[targets.runnable()[0].name]["advice"]


@native
def test_a_switch_is_shown_and_how_to_undo_it(directory, monkeypatch):
    monkeypatch.setenv(targets.SWITCH, "0")
    kernel = tree()["kernel"]
    assert kernel[targets.SWITCH]["value"] == "0"
    assert kernel["why"] == {"value": "switched off by CUMULANT_NATIVE=0", "advice": "Unset CUMULANT_NATIVE."}


@native
@pytest.mark.skipif(not targets.compiler(), reason="install g++ to run")
def test_a_library_that_is_older_than_its_sources_is_named(directory):
    path = build(directory)
    assert tree()["kernel"]["serves"]["value"] == f"native {targets.runnable()[0].name}"
    (directory / "panel.h").write_text("// changed\n")
    os.utime(path, (1, 1))
    advice = tree()["kernel"][targets.runnable()[0].name]["advice"]
    assert advice == "Older than panel.h: run make test, or setup.py build_ext --inplace."


def test_a_machine_without_a_kernel(directory, monkeypatch):
    monkeypatch.setattr(targets, "machine", lambda: "riscv64")
    found = tree()
    assert found["kernel"]["why"] == {"value": "there is none for riscv64 processors", "advice": ""}
    assert found["processor"]["instructions"]["value"].startswith("riscv64, none")


def test_a_compiler_that_cannot_be_run_is_no_failure(monkeypatch, tmp_path):
    program = tmp_path / "g++"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert "cannot be run" in tree()["compiler"]["C++"]["value"]
