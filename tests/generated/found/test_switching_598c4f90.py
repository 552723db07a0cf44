"""Found by `make fuzz`: the ratio of variances of a state that is certain was negative by rounding."""

import tests.generated.test_switching  # noqa: F401
from tests.generated.properties import PROPERTIES
from tests.generated.test_switching import Case


def test_the_last_step_has_nothing_to_smooth() -> None:
    PROPERTIES["tests.generated.test_switching:test_the_last_step_has_nothing_to_smooth"].check(
        Case(
            seed=2061490,
            modes=3,
            dim=3,
            observed=1,
            steps=4,
            start="prior",
            zeros=0.5,
            missing="none",
            ranks="none",
            varying=False,
            decades=0,
            outlier=3,
            method="gpb1",
            order=2,
            batch=(),
            masked=False,
            fixed=(),
        )
    )
