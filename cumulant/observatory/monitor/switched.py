"""Models of transformers on ``attn_implementation="cumulant"`` while a monitor acts on their attention."""

from __future__ import annotations

import weakref

from torch import nn

from cumulant.checks import sentence
from cumulant.kernels.native.library import library, why_not
from cumulant.nn.wrappers import attention_configurations
from cumulant.observatory.hooks.attention import unrecordable
from cumulant.observatory.hooks.structure import attention_modules, transformers_models
from cumulant.observatory.monitor.actions import logger

DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")

_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref] = weakref.WeakKeyDictionary()  # layer → who acts on it


class SwitchedAttention:
    """The attention layers of a model, which nobody else acts on, from its creation to `close`.

    Models of transformers inside are on the attention function "cumulant": its kernel gives statistics with the output.

    argument  of `Monitor` that asks for it, for what is refused: dropout, attention of a model's own code, layers that
              another monitor acts on
    """

    def __init__(self, model: nn.Module, argument: str):
        configurations = _changeable(model, argument)
        modules = [model.get_submodule(name) for name in attention_modules(model)]
        for name, module in zip(attention_modules(model), modules, strict=True):
            owner = _owners.get(module)
            if owner is not None and owner() is not None:
                expected = "a model that no other monitor clips or penalises"
                advice = "Close the other monitor first, or leave its `with` block."
                raise ValueError(sentence(f"Monitor.{argument}", expected, f"{name} of one", advice))
        for module in modules:
            _owners[module] = weakref.ref(self)
        if configurations:
            import cumulant.transformers  # noqa: F401, registers the function

            _say_what_it_costs(model)
        before = [(config, getattr(config, "_attn_implementation_internal", None)) for config in configurations]
        for config in configurations:
            config._attn_implementation_internal = "cumulant"  # pyright: ignore[reportAttributeAccessIssue]
        self._finalizer = weakref.finalize(self, _restore, modules, before)

    def close(self) -> None:
        """Let go of the model: its attention functions are as they were. Closing twice is closing once."""
        self._finalizer()


def _say_what_it_costs(model: nn.Module) -> None:
    """One line where the kernels in torch serve, which are slower than the attention that they take the place of."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device == "cpu" and library() is None:
        logger.warning(
            "attention runs without the compiled kernel (%s): a training step with a clip or an entropy floor takes "
            "1.24 times one on sdpa, with the kernel 0.86 times (measured with 4 layers, width 256, 512 tokens)",
            why_not(),
        )


def _changeable(model: nn.Module, argument: str) -> list[object]:
    """The configurations of the transformers models inside, if their attention can be ours."""
    configurations = []
    for inner in transformers_models(model).values():
        if not inner._can_set_attn_implementation():  # pyright: ignore[reportCallIssue]
            raise ValueError(unrecordable(inner))
        for config in attention_configurations(inner):
            name = next((n for n in DROPOUT if isinstance(p := getattr(config, n, 0), int | float) and p > 0), None)
            if name is not None:
                advice = f"Set config.{name} = 0 when the model is built: its kernel has no dropout."
                raise ValueError(sentence(f"Monitor.{argument}: {name}", "0", getattr(config, name), advice))
            configurations.append(config)
    return configurations


def _restore(modules: list[nn.Module], configurations: list[tuple[object, str | None]]) -> None:
    for module in modules:
        _owners.pop(module, None)
    for config, name in configurations:
        config._attn_implementation_internal = name  # pyright: ignore[reportAttributeAccessIssue]
