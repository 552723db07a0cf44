"""Run the kernels on a GPU: are they right there, and what do they cost beside torch's?

Nothing of this library has run on a GPU before it was released. Whoever has one can say with one command, in a clone
with the package installed:

    python examples/on_gpu.py                     # all rows, on the first CUDA device; writes on_gpu.json
    python examples/on_gpu.py --quick variance    # one row on small inputs
    python examples/on_gpu.py --device cpu --quick variance    # the same script where there is no GPU

It prints the device and versions; how far each kernel path (triton, fused, streaming, dense) is from float64 in values
and gradients, in float32, bfloat16 and float16; whether torch's own attention kernel passes the check that is made
before the library uses it; and ratios to torch's attention (SDPA) and FlexAttention for rows of docs/benchmarks.md,
timed between CUDA events with both sides in turns. Exits with 1 if a path is wrong. Everything goes into one JSON file:
please attach it to an issue.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import device_cases, report  # noqa: E402
from benchmarks.device_accuracy import PATHS, Row, faults  # noqa: E402
from benchmarks.results import Results, machine  # noqa: E402
from benchmarks.run import Effort, run  # noqa: E402
from cumulant.checks import device_of, sentence  # noqa: E402
from cumulant.files import versions, write  # noqa: E402
from cumulant.kernels.attention_check import check  # noqa: E402
from cumulant.kernels.operator import BACKENDS  # noqa: E402
from cumulant.kernels.torch_attention import kernel_of  # noqa: E402

TOKENS, FEW_TOKENS = 1000, 65  # of a problem, no multiple of a block
WIDTHS = (16, 64, 80, 128, 256)
SOURCE = "benchmarks.device_cases"


def main(words: list[str] | None = None) -> int:
    options = _options(words)
    device = _device(options.device)
    if isinstance(device, str):
        print(device, file=sys.stderr)
        return 2
    about = _about(device)
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    paths = [path for path in PATHS if path == "auto" or path in BACKENDS]
    tokens = FEW_TOKENS if options.quick else TOKENS
    found = {path: _accuracy(path, options.device, tokens) for path in paths}
    wrong = _print_accuracy(found)
    kernels = _attention_kernel(device)
    results = Results(machine=_machine(options.device), quick=options.quick, cases=[])
    everything = {"about": about, "accuracy": found, "torch_attention": kernels, "benchmarks": results}
    cases = device_cases.catalogue(options.quick)
    effort = {"repeats": 3, "budget": 1.0} if options.quick else {"repeats": 20, "budget": 10.0}
    settings = Effort(quick=options.quick, source=SOURCE, device=options.device, **effort)
    for result in run([cases[name] for name in options.rows or cases], settings):
        results["cases"].append(result)
        write(
            options.out, json.dumps(everything, indent=1, ensure_ascii=False) + "\n"
        )  # what is there if it is stopped
    print(report.markdown(results))
    write(options.out, json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
    print(f"{options.out} has all figures: please attach it to an issue.")
    return 1 if wrong else 0


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(device_cases.ROWS)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(known)}; all of them if none is named")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, … or cpu")
    parser.add_argument("--quick", action="store_true", help="small inputs: does everything run?")
    parser.add_argument("--out", type=Path, default=Path("on_gpu.json"))
    options = parser.parse_args(words)
    for name in options.rows:
        if name not in known:
            parser.error(f"no row is called {name!r}; there are {', '.join(known)}")
    return options


def _device(name: str) -> torch.device | str:
    """The device, or why there is none."""
    try:
        device = device_of("--device", name)
    except ValueError as error:
        return f"{error} With --device cpu the script runs here, to see what it does."
    if device.type not in ("cpu", "cuda"):
        return sentence("--device", "cpu or a CUDA device", name, "Timing is by events of CUDA.")
    return device


def _about(device: torch.device) -> dict[str, str]:
    found = {**versions("torch", "triton"), "cumulant": versions("cumulant")["cumulant"], "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "CUDA": str(torch.version.cuda or torch.version.hip),
            "cuDNN": str(torch.backends.cudnn.version()),
            "TF32 in matrix products": str(torch.backends.cuda.matmul.allow_tf32),
        }
    return found


def _machine(device: str) -> Any:
    return machine("cpu" if torch.device(device).type == "cpu" else device)


def _accuracy(path: str, device: str, tokens: int) -> list[Row] | str:
    """Errors of a path, or how its process failed; in one of its own, as an illegal access ends all work on a GPU."""
    command = [sys.executable, "-m", "benchmarks.device_accuracy", path, device, str(tokens)]
    inherited = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), inherited)))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return f"failed: {lines[-1] if lines else f'exit status {done.returncode}'}"
    return json.loads(done.stdout)


def _print_accuracy(found: dict[str, list[Row] | str]) -> list[str]:
    """A line a path; what is wrong with them."""
    wrong = []
    for path, rows in found.items():
        if isinstance(rows, str):
            wrong.append(f"{path} {rows}")
            print(f"{path}: {rows}")
            continue
        served = [row for row in rows if row["refused"] is None]
        if not served:
            print(f"{path}: not used here: {rows[0]['refused']}")
            continue
        most = max(size for row in served for name, size in row["errors"].items() if not name.startswith("gradient"))
        words = (
            f"{path}: {len(served)} of {len(rows)} problems served, values within {most:.0e} of their largest number"
        )
        bad = faults(served)
        wrong += bad
        print(words + (f"; WRONG: {'; '.join(bad)}" if bad else ", gradients as they should be"))
    return wrong


def _attention_kernel(device: torch.device) -> dict[str, str]:
    """What the check of torch's attention kernel says, for each width."""
    kernel = kernel_of(device)
    if kernel is None:
        return {}
    said = {str(width): check(kernel, device, width, width) or "right" for width in WIDTHS}
    print(f"{kernel.name}: " + ", ".join(f"d={width} {words}" for width, words in said.items()))
    return said


if __name__ == "__main__":
    if importlib.util.find_spec("cumulant") is None:
        raise SystemExit("cumulant is not installed here: pip install -e . in the clone.")
    raise SystemExit(main())
