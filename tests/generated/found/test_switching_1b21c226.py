"""Found by `make fuzz`: em raised where a regression that nothing determines left a noise that is no covariance."""

import tests.generated.test_switching  # noqa: F401
from tests.generated.properties import PROPERTIES
from tests.generated.test_switching import Case


def test_em_never_returns_a_lower_likelihood_than_it_was_given() -> None:
    PROPERTIES["tests.generated.test_switching:test_em_never_returns_a_lower_likelihood_than_it_was_given"].check(
        Case(
            seed=0,
            modes=3,
            dim=3,
            observed=3,
            steps=3,
            start="prior",
            zeros=0.5,
            missing="entries",
            ranks="none",
            varying=False,
            decades=3,
            outlier=3,
            method="gpb1",
            order=3,
            batch=(3,),
            masked=False,
            fixed=(),
        )
    )
