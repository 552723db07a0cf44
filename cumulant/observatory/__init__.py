"""Looking into real transformers: `attach` a recorder, `observe` texts, keep a `Record`, `render` a page.

hooks        how attention, hidden states and weights of a model are reached
statistics   what is computed of an attention call or a state
text         files, JSONL, Parquet and URIs → documents → windows of tokens
models       models to observe, loaded
record       the record of an observation and its files
report       tables, verdicts, page
runs         observe, shards, resume, Ray, over training, ablation, nulls
monitor      watching a training
command      `cumulant observe`, `cumulant report`, `cumulant compare`
"""

import importlib
from typing import TYPE_CHECKING

from cumulant.extras import missing_package

if TYPE_CHECKING:
    from cumulant.observatory.models.load import load
    from cumulant.observatory.record import Record
    from cumulant.observatory.record.recorder import attach
    from cumulant.observatory.report.directory import render
    from cumulant.observatory.runs.observe import observe
    from cumulant.observatory.runs.repeated import repeated_induction
    from cumulant.observatory.text.corpus import read_texts

__all__ = ["Record", "attach", "load", "observe", "read_texts", "render", "repeated_induction"]

_MODULES = {
    "Record": "record",
    "attach": "record.recorder",
    "load": "models.load",
    "observe": "runs.observe",
    "read_texts": "text.corpus",
    "render": "report.directory",
    "repeated_induction": "runs.repeated",
}


def __getattr__(name: str):
    """Public names are imported when they are first used: `monitor` works without transformers."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require("safetensors", "transformers")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def _require(*packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            raise missing_package("cumulant.observatory", package, "hf") from None
