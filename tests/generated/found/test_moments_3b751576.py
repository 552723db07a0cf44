"""Found by `make fuzz`: without queries, atoms that hold NaN had a gradient of NaN."""

from math import inf, nan  # noqa: F401

import tests.generated.test_moments  # noqa: F401
from tests.generated.properties import PROPERTIES
from tests.generated.tensors import Layout
from tests.generated.test_moments import Request


def test_gradients_are_those_of_the_definition() -> None:
    PROPERTIES["tests.generated.test_moments:test_gradients_are_those_of_the_definition"].check(
        Request(
            batch=(),
            kv_heads=None,
            q=0,
            n=3,
            d=1,
            e=None,
            dtype="float64",
            layouts=(
                Layout(order="contiguous", step=1, offset=0, shared="none"),
                Layout(order="contiguous", step=1, offset=0, shared="none"),
                Layout(order="contiguous", step=1, offset=0, shared="none"),
            ),
            weights="none",
            mask="none",
            causal=False,
            window=None,
            offset=0,
            sink="none",
            garbage="nan",
            sharpness=0.0,
            shift=0.0,
            backend="streaming",
            seed=0,
        )
    )
