"""Found by `make fuzz`: a record whose sampled vectors lacked the number of one sequence ended in a RuntimeError."""

import tests.generated.test_directories  # noqa: F401
from tests.generated.properties import PROPERTIES
from tests.generated.test_directories import Broken, Damage


def test_a_broken_directory_gets_one_sentence_and_stays_as_it_is() -> None:
    PROPERTIES["tests.generated.test_directories:test_a_broken_directory_gets_one_sentence_and_stays_as_it_is"].check(
        Broken(base="record", damage=Damage(file=0, how="tensor: fewer", where=0.75, value=0), command="report")
    )
