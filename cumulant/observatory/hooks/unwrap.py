"""Which model is meant: the transformer inside of what `torch.compile`, data parallelism or a pooling module made.

A record has the paths of the modules of the model inside, so that it is the same with and without the wrapping.
"""

from __future__ import annotations

import sys

from torch import nn

from cumulant.checks import sentence
from cumulant.observatory.hooks.nn_adapter import reporting_layers

# wrappers of torch that hand their arguments on unchanged, and where they keep the model
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}
EXPECTED = "a transformers model, or one with layers of cumulant.nn"


def unwrapped(model: object) -> nn.Module:
    """The model that is observed when ``model`` is.

    `torch.compile(m)`, DataParallel, DistributedDataParallel and FSDP are taken off. Of a module that is no
    transformers model itself the one inside is taken; with none, or several, or layers of `cumulant.nn` beside it, it
    is refused with what to pass.

    >>> unwrapped(nn.Linear(2, 2))
    Traceback (most recent call last):
    TypeError: attach.model: expected a transformers model, or one with layers of cumulant.nn, got Linear. Load one with
    AutoModel.from_pretrained(...).
    """
    if not isinstance(model, nn.Module):
        advice = "Pass the model itself, not a function that calls it."
        raise TypeError(sentence("attach.model", EXPECTED, f"a {type(model).__name__}", advice))
    inner = _without_wrappers(model)
    if is_transformers(inner):
        return inner
    inside, own_layers = transformers_models(inner), reporting_layers(inner)
    own_layers = [name for name in own_layers if not any(_is_under(name, path) for path in inside)]
    if not inside and own_layers:
        return inner
    if not inside:
        advice = "Load one with AutoModel.from_pretrained(...)."
        raise TypeError(sentence("attach.model", EXPECTED, type(inner).__name__, advice))
    if len(inside) == 1 and not own_layers:
        return _without_wrappers(*inside.values())
    named = [f"{type(inner.get_submodule(path)).__name__} at .{path}" for path in (*inside, *own_layers[:1])]
    first, *others = (f"attach(model.{path})" for path in (*inside, *own_layers[:1]))
    advice = f"Pass one of them, {' or '.join([first, *others])}, and call the whole as before."
    raise TypeError(sentence("attach.model", "one model", f"{type(inner).__name__} with {', '.join(named)}", advice))


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is one of the library transformers; without that library none is."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


def _without_wrappers(model: nn.Module) -> nn.Module:
    while True:
        names = (WRAPPERS.get(kind.__name__) for kind in type(model).__mro__ if kind.__module__.startswith("torch."))
        inner = next((getattr(model, name, None) for name in names if name), None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def transformers_models(model: nn.Module) -> dict[str, nn.Module]:
    """Paths and modules of the outermost transformers models in ``model``, itself included; each of them once."""
    named = {name: module for name, module in model.named_modules() if is_transformers(module)}
    return {name: m for name, m in named.items() if not any(_is_under(name, o) for o in named if o != name)}


def _is_under(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")
