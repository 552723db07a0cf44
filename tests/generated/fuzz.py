"""`make fuzz MINUTES=30`: every property on new cases until the time is up.

Each process goes round the properties of `tests/generated`, some seconds of random cases each. A case that fails is
shrunk and written down as a test in `tests/generated/found/`, and its property rests for the remainder of the run. At
the end stand the volumes; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import multiprocessing
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from queue import Empty
from typing import Any

import hypothesis
import torch

from tests.generated.properties import PROPERTIES, SUITE, Property

HERE = Path(__file__).parent
FOUND = HERE / "found"
TURN = 10.0  # seconds for one property before the next has its turn, about
REPORT = 60.0  # seconds between two lines of progress


def load(only: str) -> list[Property]:
    for path in sorted(HERE.glob("test_*.py")):
        importlib.import_module(f"tests.generated.{path.stem}")
    return [p for name, p in sorted(PROPERTIES.items()) if only in name]


def try_batch(prop: Property, seed: int, size: int) -> tuple[int, Any, str]:
    """How many cases were tried, and the smallest failing one with its traceback, if any."""
    tried, failing = 0, None

    def check(case: Any) -> None:
        nonlocal tried, failing
        tried += 1
        try:
            prop.check(case)
        except Exception:
            failing = case
            raise

    settings = hypothesis.settings(
        SUITE, derandomize=False, max_examples=size, report_multiple_bugs=False, verbosity=hypothesis.Verbosity.quiet
    )
    run = hypothesis.seed(seed)(settings(hypothesis.given(case=prop.cases)(check)))
    try:
        run()
    except Exception:
        return tried, failing, traceback.format_exc(limit=-3)
    return tried, None, ""


def write_test(prop: Property, case: Any, trouble: str) -> Path:
    """The failing case as a test of its own."""
    code = repr(case)
    module, function = prop.name.split(":")
    digest = hashlib.sha256(f"{prop.name} {code}".encode()).hexdigest()[:8]
    path = FOUND / f"test_{module.removeprefix('tests.generated.test_')}_{digest}.py"
    used = sorted({(type(x).__module__, type(x).__name__) for x in _parts(case)})
    imports = "".join(f"from {m} import {n}\n" for m, n in used)
    if re.search(r"\b(inf|nan)\b", code):
        imports = "from math import inf, nan  # noqa: F401\n\n" + imports
    lines = [line for line in trouble.splitlines() if re.match(r"\w[\w.]*(Error|Warning|Exception)\b", line)]
    last = (lines or ["failed"])[-1][:80].replace('"', "'").replace("\\", "/")
    text = (
        f'"""Found by `make fuzz`: {last}"""\n\n{imports}import {module}  # noqa: F401\n'
        "from tests.generated.properties import PROPERTIES\n\n\n"
        f'def {function}() -> None:\n    PROPERTIES["{prop.name}"].check({code})\n'
    )
    FOUND.mkdir(exist_ok=True)
    (FOUND / "__init__.py").touch()
    path.write_text(text)
    return path


def _parts(case: Any):
    """The dataclasses a case is made of."""
    if dataclasses.is_dataclass(case):
        yield case
        case = [getattr(case, f.name) for f in dataclasses.fields(case)]
    if isinstance(case, list | tuple):
        for part in case:
            yield from _parts(part)


def work(only: str, until: float, seed: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    random.seed(seed)
    properties = load(only)
    random.shuffle(properties)
    sizes = dict.fromkeys((p.name for p in properties), 3)
    while properties and time.time() < until:
        for prop in list(properties):
            if time.time() >= until:
                break
            start = time.time()
            tried, case, trouble = try_batch(prop, random.getrandbits(63), sizes[prop.name])
            spent = (time.time() - start) / max(1, tried)
            sizes[prop.name] = int(min(1000, max(3, TURN / max(spent, 1e-6))))
            path = None if not trouble else write_test(prop, case, trouble)
            results.put((prop.name, tried, str(path) if path else "", trouble))
            if trouble:
                properties.remove(prop)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="properties whose name contains this")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    if not load(given.only):
        print(f"no property has {given.only!r} in its name", file=sys.stderr)  # noqa: T201
        return 2
    seed = random.SystemRandom().getrandbits(32) if given.seed is None else given.seed
    start = time.time()
    until = start + 60 * given.minutes
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue = context.Queue()
    workers = [context.Process(target=work, args=(given.only, until, seed + k, results)) for k in range(given.jobs)]
    for worker in workers:
        worker.start()
    volumes: Counter[str] = Counter()
    failures: list[tuple[str, str, str]] = []
    reported = start
    while any(w.is_alive() for w in workers) or not results.empty():
        try:
            name, tried, path, trouble = results.get(timeout=1)
            volumes[name] += tried
            if trouble:
                failures.append((name, path, trouble))
                print(f"FAILED {name}\n  written to {path}\n{trouble}", flush=True)  # noqa: T201
        except Empty:
            pass
        if time.time() - reported > REPORT:
            reported = time.time()
            line = f"{(reported - start) / 60:5.1f} min  {volumes.total():9,d} cases  {len(failures)} failed"
            print(line, flush=True)  # noqa: T201
    died = [w.exitcode for w in workers if w.exitcode]
    print(f"\nseed {seed}, {(time.time() - start) / 60:.1f} minutes, {given.jobs} processes\n")  # noqa: T201
    print("| property | cases | failed |\n|---|---|---|")  # noqa: T201
    for name, count in sorted(volumes.items()):
        failed = sum(name == f for f, _, _ in failures)
        print(f"| {name.removeprefix('tests.generated.').replace(':', ' ')} | {count:,d} | {failed} |")  # noqa: T201
    print(f"| all | {volumes.total():,d} | {len(failures)} |")  # noqa: T201
    if died:
        print(f"a process died with exit code {died}: its last property is not among the failures", file=sys.stderr)  # noqa: T201
    return 1 if failures or died else 0


if __name__ == "__main__":
    sys.exit(main())
