"""The house: imports go downward, importing is cheap, shapes are what the annotations say."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cumulant"
# each room may import from itself and from the rooms before it
ROOMS = [
    "typing",
    "checks",
    "special",
    "solve",
    "kernels",
    "measures",
    "geometry",
    "testing",
    "attention",
    "residual",
    "hopfield",
    "contrastive",
    "regression",
    "potentials",
    "duality",
    "link",
    "boltzmann",
    "dynamics",
    "filters",
    "samplers",
    "nn",
    "documents",
    "drawing",
    "terminal",
    "observatory",
    "training",
    "experiments",
    "tracking",
    "claims",
    "benchmarks",
    "cli",
    "__main__",
]


def room_of(module: str) -> str:
    return module.split(".")[1]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        found |= {n for n in names if n.startswith("cumulant.")}
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path):
    own = ROOMS.index(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    for module in imports_of(path):
        assert ROOMS.index(room_of(module)) <= own, f"{path.name} imports upward: {module}"


def test_core_needs_only_torch_numpy_and_jaxtyping():
    allowed = {"torch", "numpy", "jaxtyping", "cumulant"} | set(sys.stdlib_module_names)
    # these say which extra to install, and are not imported by the core
    extras = ("benchmarks", "claims", "cli.py", "drawing.py", "experiments", "observatory")
    extras += ("terminal.py", "tracking", "training")
    # imported where they are needed, with a sentence where they are missing
    inside = {"integrate.py": {"torchdiffeq", "scipy"}, "documents.py": {"polars"}}
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in extras:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                here = allowed | (inside.get(path.name, set()) if node.col_offset else set())
                assert name.split(".")[0] in here, f"{path.name} imports {name}"


def test_import_takes_under_two_seconds_beyond_torch():
    code = "import torch, time; t = time.perf_counter(); import cumulant; print(time.perf_counter() - t)"
    seconds = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert seconds < 2


@pytest.mark.long
def test_annotated_shapes_hold_at_run_time():
    """The registry once more, with jaxtyping and beartype checking every annotated call."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "tests/test_laws.py"]
    chosen = "(oracle or symmetric or inverts or kl_and_volume) and not compiles"
    environment = os.environ | {"CUMULANT_TYPECHECK": "1"}
    run = subprocess.run([*command, "-k", chosen], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout


def test_the_package_is_the_command():
    run = subprocess.run([sys.executable, "-m", "cumulant", "--help"], capture_output=True, text=True, check=True)
    assert all(name in run.stdout for name in ("observe", "train", "track", "bench"))
