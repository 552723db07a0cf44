"""Found by `make fuzz`: the log-volume of a law whose scores overflow ended in an error of linear algebra."""

import tests.generated.test_families  # noqa: F401
from tests.generated.properties import PROPERTIES
from tests.generated.test_families import Query


def test_families_are_exact_over_the_whole_range() -> None:
    PROPERTIES["tests.generated.test_families:test_families_are_exact_over_the_whole_range"].check(
        Query(
            family="Empirical",
            parameters=(0.0, 0.0, 0.0, 0.0, 1.78, -1.0, 0.0, 0.0, 0.0),
            eta=(1.7976931348623157e308, 1.7976931348623157e308),
            dtype="float64",
        )
    )
