"""Found by `make fuzz`: entries of a covariance that are 0 up to rounding were compared with exactly 0."""

import tests.generated.test_switching  # noqa: F401
from tests.generated.properties import PROPERTIES
from tests.generated.test_switching import Conjugate


def test_conjugate_filters_that_forget_keep_their_laws() -> None:
    PROPERTIES["tests.generated.test_switching:test_conjugate_filters_that_forget_keep_their_laws"].check(
        Conjugate(
            seed=0,
            family="NormalGamma",
            modes=2,
            steps=1,
            start="prior",
            zeros=0.0,
            missing=False,
            memory="all",
            size=0.0001,
        )
    )
