"""Found by `make fuzz`: a seed beyond 64 bits ended in an OverflowError."""

import tests.generated.test_commands  # noqa: F401
from tests.generated.properties import PROPERTIES
from tests.generated.test_commands import Line


def test_any_command_line_ends_well_or_leaves_nothing_behind() -> None:
    PROPERTIES["tests.generated.test_commands:test_any_command_line_ends_well_or_leaves_nothing_behind"].check(
        Line(model="tiny", options=(("--seed", "1180591620717411303424"),))
    )
