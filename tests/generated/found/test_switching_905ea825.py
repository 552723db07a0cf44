"""Found by `make fuzz`: a smoother without noise was held to 1e-9 where a rounding of its model moves it by more."""

import tests.generated.test_switching  # noqa: F401
from tests.generated.properties import PROPERTIES
from tests.generated.test_switching import Case


def test_a_sequence_has_the_same_answer_alone_and_in_a_batch() -> None:
    PROPERTIES["tests.generated.test_switching:test_a_sequence_has_the_same_answer_alone_and_in_a_batch"].check(
        Case(
            seed=1,
            modes=2,
            dim=3,
            observed=2,
            steps=5,
            start="prior",
            zeros=0.0,
            missing="none",
            ranks="none",
            varying=False,
            decades=0,
            outlier=0,
            method="gpb1",
            order=2,
            batch=(3,),
            masked=False,
            fixed=(),
        )
    )
