"""Which sweep computes the losses."""

import pytest

from cumulant.kernels import losses, strips
from cumulant.kernels.native import losses as native
from cumulant.kernels.native.call import entries


@pytest.fixture(params=["native", "torch"])
def kernel(request, monkeypatch):
    """The sweep in C++ where it is built, and the one in torch, which serves where it is not."""
    if request.param == "native" and entries() is None:
        pytest.skip("no native kernel is built here: `cumulant doctor` says why")
    if request.param == "torch":
        monkeypatch.setattr(losses, "entries", lambda: None)


@pytest.fixture
def small_blocks(monkeypatch):
    """Strips of 32 rows and chunks of 64 columns, or blocks of 16, so that few points already need several."""
    monkeypatch.setattr(strips, "ROWS", 32)
    monkeypatch.setattr(strips, "COLUMNS", 64)
    for name, value in (("ROWS", 32), ("KEPT", 1), ("UNKEPT", 32), ("BLOCKS", (16, 16))):
        monkeypatch.setattr(native, name, value)
