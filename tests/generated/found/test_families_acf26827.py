"""Found by `make fuzz`: the gradient of a sphere's G was 0 where rounding carries G beyond the largest number."""

import tests.generated.test_families  # noqa: F401
from tests.generated.properties import PROPERTIES
from tests.generated.test_families import OnSphere


def test_spheres_are_exact_over_the_whole_range() -> None:
    PROPERTIES["tests.generated.test_families:test_spheres_are_exact_over_the_whole_range"].check(
        OnSphere(dim=18, radius=1.0, length=3.4028234663852886e38, seed=18, dtype="float32")
    )
