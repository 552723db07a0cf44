"""Whether a model can be observed while it reads text: token ids must be all it needs."""

from __future__ import annotations

import inspect
import re

import torch
from torch import nn

from cumulant.checks import sentence

# what models call images and sound in their arguments; `past_key_values` is none of them
OTHER_INPUT = re.compile(r"(pixel|input|image|video|audio|speech)\w*_(values|features)\w*")


def require_text_model(model: nn.Module) -> None:
    """Refuse a model that needs more than token ids, as Whisper, CLIP and ViT do, and say how it can be observed.

    Of a model that takes images or sound beside tokens it is found by a call with two tokens whether it needs them.
    """
    main = getattr(model, "main_input_name", "input_ids")
    others = [name for name in inspect.signature(model.forward).parameters if OTHER_INPUT.fullmatch(name)]
    if main == "input_ids" and (not others or _reads_tokens(model)):
        return
    needs = [name for name in dict.fromkeys((main, *others)) if name != "input_ids"]
    got = f"{type(model).__name__}, which needs {' and '.join(needs)}"
    call = ", ".join(f"{name}=..." for name in needs)
    advice = (
        f"For now call it yourself in Python: `with attach(model) as recorder: model({call}, ...)`, then "
        "`recorder.record().save(directory)`."
    )
    raise ValueError(sentence("observe.model", "a model that reads token ids alone", got, advice))


def _reads_tokens(model: nn.Module) -> bool:
    place = next(model.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.int64, device=place)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    try:
        with torch.inference_mode():
            model(**given)
    except Exception:  # a model without its image or sound may fail anywhere, in any way
        return False
    return True
