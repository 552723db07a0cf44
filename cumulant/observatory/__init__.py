"""Looking into real transformers: `attach` a recorder, `observe` texts, keep a `Record`, `render` a page.

The only part of the library that knows Hugging Face's transformers.
"""

try:
    import safetensors  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"cumulant.observatory needs {missing.name}: install cumulant[hf].") from None

from cumulant.observatory.directory import render
from cumulant.observatory.models import load
from cumulant.observatory.observe import observe
from cumulant.observatory.record import Record
from cumulant.observatory.recorder import attach
from cumulant.observatory.texts import read_texts

__all__ = ["Record", "attach", "load", "observe", "read_texts", "render"]
