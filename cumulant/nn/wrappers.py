"""What torch puts around a model, and which models are those of the library transformers."""

from __future__ import annotations

import sys

from torch import nn

# wrappers of torch that hand their arguments on unchanged, and where they keep the model
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}


def without_wrappers(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile(m)`, DataParallel, DistributedDataParallel and FSDP.

    >>> without_wrappers(nn.DataParallel(nn.Linear(2, 3)))
    Linear(in_features=2, out_features=3, bias=True)
    """
    while True:
        names = (WRAPPERS.get(kind.__name__) for kind in type(model).__mro__ if kind.__module__.startswith("torch."))
        inner = next((getattr(model, name, None) for name in names if name), None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is one of the library transformers; without that library none is."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


def attention_configurations(model: nn.Module) -> list:
    """Every configuration inside the model, once: each has the name of an attention function of its own."""
    found: dict[int, object] = {}
    pending: list = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "sub_configs")]
    while pending:
        config = pending.pop()
        if id(config) not in found:
            found[id(config)] = config
            pending += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
    return list(found.values())
