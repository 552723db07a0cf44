"""Random transformers of every architecture on transformers' interface: what is recorded is what eager attention does.

The oracle is the model's own plain attention: its weights W, and its score s of one key, give the log-normalizer by the
definition W = e^{s − G}, and entropy and effective atoms, in NumPy and float64. Many models have a softmax in single
precision whatever their dtype is, which bounds what can be asked of those in double.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from cumulant.observatory import Record, attach
from cumulant.observatory.record.recorder import NOT_RECORDED
from tests.generated.properties import holds_for
from tests.generated.tensors import seeds
from tests.observatory.tiny_models import (
    AUDIO_MODELS,
    OFF_THE_INTERFACE,
    ON_THE_INTERFACE,
    PARTLY_ON_THE_INTERFACE,
    TWO_SIDED,
    VISION_MODELS,
    WITHOUT_ATTENTION,
    hf,
    hooks_of,
    transformer,
)

IMAGES_AND_TEXT = ("clip", "siglip")
QUANTITIES = ("log_normalizer", "entropy", "effective_atoms")
CLOSE = {"float32": 2e-4, "float64": 2e-6}
EXPERTS = ("mixtral", "gpt_oss", "qwen3_moe", "olmoe")  # torch multiplies them in single precision, in blocks of four


@dataclass(frozen=True)
class Reading:
    """A model and what it reads.

    group           queries that share a key head, where the architecture has that
    padding         side on which all but the first sequence are padded, or none
    implementation  of attention, while it is recorded; the oracle is always eager
    positional      ids and mask are given by position, not by name
    """

    kind: str
    heads: int = 2
    group: int = 1
    head_dim: int = 4
    layers: int = 2
    batch: int = 2
    length: int = 7
    padding: str = "right"
    dtype: str = "float32"
    implementation: str = "sdpa"
    positional: bool = False
    seed: int = 0

    def model(self) -> Any:
        key_heads = self.heads // self.group
        head_dim = 8 if self.kind in EXPERTS else self.head_dim
        sizes = {"heads": self.heads, "key_heads": key_heads, "head_dim": head_dim, "layers": self.layers}
        dtype = torch.float32 if self.kind in EXPERTS else getattr(torch, self.dtype)
        model = transformer(self.kind, **sizes, seed=self.seed).to(dtype)
        if model.config._attn_implementation != "eager":  # those that cap scores or have sinks know no other
            model.set_attn_implementation(self.implementation)
        return model

    def inputs(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(3, 50, (self.batch, self.length), generator=generator)
        mask = self.mask(self.length, generator)
        text = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
        dtype = getattr(torch, self.dtype)
        pixels = torch.randn(self.batch, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
        if self.kind in AUDIO_MODELS:
            sound = torch.randn(self.batch, 8, 20, generator=generator, dtype=torch.float64).to(dtype)
            return {"input_features": sound} | {f"decoder_{name}": tensor for name, tensor in text.items()}
        if self.kind in VISION_MODELS:
            return {"pixel_values": pixels} | (text if self.kind in IMAGES_AND_TEXT else {})
        if self.kind in TWO_SIDED:
            return text | {f"decoder_{name}": tensor for name, tensor in self._decoder_inputs(generator).items()}
        return text

    def _decoder_inputs(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        length = 1 + self.length // 2
        ids, mask = torch.randint(3, 50, (self.batch, length), generator=generator), self.mask(length, generator)
        return {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})

    def mask(self, length: int, generator: torch.Generator) -> torch.Tensor | None:
        if self.padding == "none":
            return None
        tokens = torch.randint(1, length + 1, (self.batch,), generator=generator)
        tokens[0] = length
        place = torch.arange(length)
        place = place if self.padding == "right" else place.flip(0)
        return (place < tokens[:, None]).long()

    def run(self, model: torch.nn.Module) -> torch.Tensor:
        given = self.inputs()
        with torch.no_grad():
            if self.positional and list(given) == list(inspect.signature(model.forward).parameters)[: len(given)]:
                return model(*given.values())[0]
            return model(**given)[0]

    def tokens(self, name: str, q: int) -> np.ndarray:
        """(batch, q) which queries of an attention module are tokens."""
        given = self.inputs()
        side = "decoder_attention_mask" if "decoder" in name.split(".") and "decoder_input_ids" in given else None
        mask = given.get(side or "attention_mask")
        if (
            mask is None
            or (self.kind in VISION_MODELS and "text_model" not in name)
            or (self.kind in AUDIO_MODELS and not side)
        ):
            return np.ones((self.batch, q), dtype=bool)
        return mask.numpy().astype(bool)


def readings(kinds: tuple[str, ...]) -> st.SearchStrategy[Reading]:
    def build(kind: str, heads: tuple[int, int], **rest) -> Reading:
        return Reading(kind, heads=heads[0], group=heads[1], **rest)

    return st.builds(
        build,
        kind=st.sampled_from(kinds),
        heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4), (6, 3)]),
        head_dim=st.sampled_from([4, 6, 8, 12]),
        layers=st.integers(1, 3),
        batch=st.integers(1, 3),
        length=st.integers(1, 40),
        padding=st.sampled_from(["none", "left", "right"]),
        dtype=st.sampled_from(["float32", "float64"]),
        implementation=st.sampled_from(["sdpa", "eager"]),
        positional=st.booleans(),
        seed=seeds(),
    )


@dataclass
class Eager:
    """What eager attention did in one call: (batch, heads, q) arrays by quantity."""

    name: str
    values: dict[str, np.ndarray]

    def tokens(self, case: Reading) -> np.ndarray:
        return case.tokens(self.name, self.values["entropy"].shape[2])


@contextmanager
def eager_calls(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, list[Eager]]]:
    """Run a model on the plain attention of its own file while inside, and collect what it does in NumPy."""
    names = {module: name for name, module in model.named_modules()}
    found: list[Eager] = []

    def attend(module, query, key, value, attention_mask, **options):
        plain = next(
            f
            for kind in type(module).__mro__
            if (f := getattr(sys.modules[kind.__module__], "eager_attention_forward", None))
        )
        out, weights = plain(module, query, key, value, attention_mask, **options)
        found.append(Eager(names[module], by_definition(query, key, attention_mask, weights, options)))
        return out, weights

    hf.AttentionInterface.register("oracle", attend)
    hf.AttentionMaskInterface.register("oracle", hf.masking_utils.eager_mask)
    model.set_attn_implementation("oracle")
    yield model, found


def by_definition(query, key, mask, weights, options) -> dict[str, np.ndarray]:
    q, k, w = (x.double().numpy() for x in (query, key, weights))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scale = options.get("scaling")
    score = np.einsum("bhqd,bhnd->bhqn", q, k) * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    if options.get("softcap") is not None:
        score = options["softcap"] * np.tanh(score / options["softcap"])
    for bias in (mask, options.get("position_bias")):
        if bias is not None:
            score = score + bias.double().numpy()
    top = w.argmax(-1)[..., None]  # any key will do; this one has the least rounding
    g = np.take_along_axis(score, top, -1)[..., 0] - np.log(np.take_along_axis(w, top, -1)[..., 0])
    if options.get("s_aux") is not None:  # a sink has the weight that the keys leave
        sink = np.exp(options["s_aux"].double().numpy()[None, :, None] - g)
        w = np.concatenate([w, sink[..., None]], -1)
    entropy = -np.sum(w * np.log(np.where(w > 0, w, 1)), -1)
    return {"log_normalizer": g, "entropy": entropy, "effective_atoms": 1 / np.square(w).sum(-1)}


def unrecorded(record: Record) -> set[str]:
    return {name for name, note in record.meta.layer_notes.items() if note == NOT_RECORDED}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit; models may leave NaN in padding."""
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def check_reading(case: Reading) -> None:
    model = case.model()
    before = case.run(model), hooks_of(model), model.config._attn_implementation
    with eager_calls(case.model()) as (other, calls):
        case.run(other)
    if any(np.isnan(call.values["entropy"].transpose(0, 2, 1)[call.tokens(case)]).any() for call in calls):
        return  # padding of a model in double precision became NaN in its single-precision softmax, and spread
    with attach(model, QUANTITIES) as recorder:
        during = case.run(model)
    assert same(before[0], during)
    assert (hooks_of(model), model.config._attn_implementation) == before[1:]
    assert same(before[0], case.run(model))
    record = recorder.record()
    assert {layer.name for layer in record.modules} == {call.name for call in calls}
    assert unrecorded(record) == ({"vision_model.head.attention"} if case.kind == "siglip" else set())
    for layer in record.modules:
        mine = [call.values for call in calls if call.name == layer.name]
        for quantity in QUANTITIES:
            whole = np.concatenate([call[quantity].transpose(1, 0, 2) for call in mine], 1)  # (heads, calls · batch, q)
            rows = np.tile(case.tokens(layer.name, whole.shape[2]), (len(mine), 1))
            expected, tally = whole[:, rows], record.tallies[f"{layer.name}/{quantity}"]
            assert tally.count.tolist() == [expected.shape[1]] * layer.heads
            found = torch.stack([tally.mean, tally.low, tally.high]).numpy()
            wanted = np.stack([expected.mean(1), expected.min(1), expected.max(1)])
            close = CLOSE["float32" if case.kind in EXPERTS else case.dtype]
            assert np.abs(found - wanted).max() <= close * (1 + np.abs(expected).max()), (layer.name, quantity)


@pytest.mark.parametrize("kind", ON_THE_INTERFACE)
def test_every_architecture_is_recorded_as_eager_attention_computes_it(kind):
    check_reading(Reading(kind, heads=4, group=2, dtype="float64", seed=1))


@holds_for(readings(ON_THE_INTERFACE), examples=20)
def test_a_record_is_what_eager_attention_computes(case: Reading) -> None:
    check_reading(case)


def record_of(case: Reading, model: torch.nn.Module) -> Record:
    with attach(model) as recorder:
        case.run(model)
    return recorder.record()


@holds_for(readings((*OFF_THE_INTERFACE, *WITHOUT_ATTENTION)), examples=6)
def test_attention_that_cannot_be_recorded_is_refused_in_a_sentence(case: Reading) -> None:
    case = replace(case, heads=4, group=1, layers=2, dtype="float32", implementation="eager")
    model = case.model()
    before, hooks = case.run(model), hooks_of(model)
    reason = "a model with attention" if case.kind in WITHOUT_ATTENTION else "transformers' AttentionInterface"
    sentence = rf"^attach\.model: expected .*{reason}, got {type(model).__name__}.*\. "
    with pytest.raises(ValueError, match=sentence) as no:
        record_of(case, model)
    assert "\n" not in str(no.value)
    assert hooks_of(model) == hooks
    assert torch.equal(before, case.run(model))


@pytest.mark.parametrize("kind", PARTLY_ON_THE_INTERFACE)
def test_attention_that_is_left_out_of_a_record_is_named(kind):
    case = Reading("t5" if kind == "longt5" else "llama", heads=4, padding="none")
    model = transformer(kind, heads=4, key_heads=4, head_dim=4, layers=2, seed=0)
    record = record_of(case, model)
    left_out = unrecorded(record)
    assert left_out
    assert not left_out & {layer.name for layer in record.modules}
    kinds = {type(model.get_submodule(name)).__name__ for name in left_out}
    assert kinds == {"longt5": {"LongT5LocalAttention"}, "minimax": {"MiniMaxLightningAttention"}}[kind]
