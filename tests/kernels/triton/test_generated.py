"""The properties of `tests.generated.test_moments` for kernels in Triton, run by its interpreter: layouts, dtypes,
masks with garbage under them, weights, bands, empty sets and rows, against sums in NumPy."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st

from cumulant.kernels import operator
from cumulant.kernels.triton.interpreter import interpreter
from tests.generated import test_moments
from tests.generated.properties import PROPERTIES, SUITE
from tests.generated.test_moments import Request, requests

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy
SIZES = [(3, 4), (1, 1), (0, 3), (3, 0), (1, 40), (70, 1), (17, 17), (35, 19), (1, 530)]
CHECKS = {name.removeprefix(f"{test_moments.__name__}:test_"): p.check for name, p in PROPERTIES.items()}


@st.composite
def small(draw) -> Request:
    """Requests that Triton takes, of sizes that the interpreter has done in a moment."""
    q, n = draw(st.sampled_from(SIZES))
    case = replace(draw(requests(backends=("triton",))), q=q, n=n)
    case = replace(case, dtype="float32" if case.dtype == "float64" else case.dtype)
    if q * n > 200:
        case = (
            replace(case, batch=(), kv_heads=None) if case.kv_heads is None else replace(case, batch=(2,), kv_heads=1)
        )
    return case


def check(name: str, case: Request, flattened: bool) -> None:
    """One property of one case, on tensors as they lie or flattened."""
    with pytest.MonkeyPatch.context() as patch, interpreter():
        if flattened:
            patch.setattr(operator, "_kind_of_plan", lambda backend, eta: None)
        CHECKS[name](case)


def holds(name: str, examples: int):
    cases = hypothesis.settings(SUITE, max_examples=examples)

    def try_cases(case: Request, flattened: bool) -> None:
        check(name, case, flattened)

    return cases(hypothesis.given(case=small(), flattened=st.booleans())(try_cases))


test_statistics = holds("statistics_are_sums_over_the_atoms_that_are_there", 8)
test_gradients = holds("gradients_are_those_of_the_definition", 6)
test_sinks = holds("a_sink_is_one_more_atom_at_zero", 3)
test_more_statistics = pytest.mark.long(holds("statistics_are_sums_over_the_atoms_that_are_there", 200))
test_more_gradients = pytest.mark.long(holds("gradients_are_those_of_the_definition", 150))
test_more_sinks = pytest.mark.long(holds("a_sink_is_one_more_atom_at_zero", 60))
