"""The house: imports go downward, importing is cheap, shapes are what the annotations say."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cumulant"
# each room may import from itself and from the rooms before it; a room with inner rooms stands for what is left of it
ROOMS = [
    "typing",
    "checks",
    "extras",
    "display",
    "files",
    "figures",
    "terminal",
    "special",
    "solve",
    "kernels",
    "families",
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
    "filters.tracking",
    "nn",
    "transformers",
    "observatory.text",
    "observatory.statistics",
    "observatory.hooks",
    "observatory.models",
    "observatory.record",
    "observatory.report",
    "observatory.runs",
    "observatory.monitor",
    "observatory.series_command",
    "observatory.command",
    "observatory",
    "cache",
    "paper.statements",
    "paper.checks",
    "paper.output",
    "paper.experiments",
    "paper.trainings",
    "paper.verify",
    "paper",
    "training",
    "doctor",
    "commands",
    "cli",
    "__main__",
]
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def module_of(path: Path) -> str:
    """cumulant/nn/__init__.py → cumulant.nn"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


def room_of(module: str) -> int:
    parts = module.split(".")[1:]
    names = (".".join(parts[:k]) for k in range(len(parts), 0, -1))
    return next(ROOMS.index(name) for name in names if name in ROOMS)


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, in any form: absolute, relative, `from package import module`."""
    found = set()
    package = module_of(path).split(".") if path.name == "__init__.py" else module_of(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            inner = {f"{source}.{a.name}" for a in node.names} & MODULES
            found |= inner or {source}
    return {name for name in found if name.startswith("cumulant.")}


def test_every_form_of_import_is_seen():
    forms = {
        "import cumulant.nn.heads": "cumulant.nn.heads",
        "from cumulant import nn": "cumulant.nn",
        "from cumulant.nn import heads as h": "cumulant.nn.heads",
        "from cumulant.nn.heads import scale": "cumulant.nn.heads",
        "from ..nn import heads": "cumulant.nn.heads",
        "from ..nn.heads import scale": "cumulant.nn.heads",
        "from . import flow": "cumulant.dynamics.flow",
        "def f():\n    from cumulant import nn": "cumulant.nn",
    }
    path = PACKAGE / "dynamics" / "flow.py"
    for text, module in forms.items():
        assert imports_of(Named(path, text)) == {module}, text


class Named:
    """A file of the package with another text."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.name = path, text, path.name

    def read_text(self) -> str:
        return self.text

    def relative_to(self, root: Path) -> Path:
        return self.path.relative_to(root)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path):
    own = room_of(module_of(path))
    for module in imports_of(path):
        assert room_of(module) <= own, f"{path.relative_to(ROOT)} imports upward: {module}"


def test_core_needs_only_torch_numpy_and_jaxtyping():
    allowed = {"torch", "numpy", "jaxtyping", "cumulant"} | set(sys.stdlib_module_names)
    # these say which extra to install, and are not imported by the core
    extras = (
        "cache",
        "cli",
        "commands",
        "doctor",
        "figures",
        "filters.tracking",
        "kernels.triton",
        "observatory",
        "paper",
        "terminal",
        "training",
        "transformers",
    )
    # imported where they are needed, with a sentence where they are missing
    inside = {"integrate.py": {"torchdiffeq", "scipy"}, "files.py": {"polars"}}
    for path in FILES:
        if module_of(path).removeprefix("cumulant.").startswith(extras):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                here = allowed | (inside.get(path.name, set()) if getattr(node, "col_offset", 0) else set())
                assert name.split(".")[0] in here, f"{path.name} imports {name}"


def test_import_takes_under_two_seconds_beyond_torch_and_loads_no_library():  # of processor time
    code = """
import sys, time, torch
start = time.process_time()
from cumulant import *  # names are imported when they are first used
print(time.process_time() - start)
library = sys.modules.get("cumulant.kernels.native.library")
assert library is None or library.find.cache_info().currsize == 0
"""
    seconds = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert seconds < 2


@pytest.mark.long
def test_annotated_shapes_hold_at_run_time():
    """The registry and the tests of the uses once more, with jaxtyping and beartype checking every annotated call."""
    laws = ["tests/measures/test_laws.py", "-k", "(oracle or symmetric or inverts or kl_and_volume) and not compiles"]
    uses = ["attention", "residual", "hopfield", "regression", "potentials", "duality", "link", "boltzmann"]
    rooms = ["contrastive/test_contrastive", "dynamics/test_dynamics", "filters/test_filters", "samplers/test_samplers"]
    # what tests give on purpose to be refused, the hook refuses first
    wrong = ("compile", "refus", "sentence", "dtype", "error", "wants_a_generator")
    files = [f"tests/{name}.py" for name in (*(f"test_{use}" for use in uses), *rooms)]
    for chosen in (laws, [*files, "-m", "not long", "-k", " and ".join(f"not {word}" for word in wrong)]):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *chosen]
        environment = os.environ | {"CUMULANT_TYPECHECK": "1"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-3000:]
        assert " passed" in run.stdout


@pytest.mark.long
def test_the_package_is_the_command():
    run = subprocess.run([sys.executable, "-m", "cumulant", "--help"], capture_output=True, text=True, check=True)
    assert all(name in run.stdout for name in ("observe", "train", "track", "bench"))
