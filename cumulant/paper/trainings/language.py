"""Language modelling of the topics of Python's help, evaluated on held-out topics."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cumulant.extras import missing_package
from cumulant.nn.language_model import IGNORED, LanguageConfig, LanguageModel
from cumulant.paper.trainings.task import PARTS, Metric, Recipe, Task, device_of_model

END = "<|end|>"  # before every topic
FOLDS = 9  # of every so many topics one is for the test and one for validation
HELD_OUT = {"test": 0, "validation": 4}


class TextSplits(NamedTuple):
    """Texts for training, validation and test."""

    train: list[str]
    validation: list[str]
    test: list[str]


def corpus() -> TextSplits:
    """The topics in alphabetic order, of every nine one for the test and one for validation.

    Topics quote each other: a paragraph of the test is taken out of the other parts, one of validation out of training.

    >>> texts = corpus()
    >>> len(texts.test), len(texts.validation), any(t in "".join(texts.train) for t in texts.test)
    (9, 9, False)
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    known: set[str] = set()
    parts = {}
    for part, at in HELD_OUT.items():
        parts[part] = [_without(known, topics[name]) for name in names[at::FOLDS]]
        known |= {paragraph.strip() for text in parts[part] for paragraph in text.split("\n\n")} - {""}
    rest = [name for i, name in enumerate(names) if i % FOLDS not in HELD_OUT.values()]
    return TextSplits(train=[_without(known, topics[name]) for name in rest], **parts)


def _without(known: set[str], text: str) -> str:
    return "\n\n".join(p for p in text.split("\n\n") if p.strip() not in known)


def train_tokenizer(texts: list[str], vocabulary: int):
    """Byte-level byte-pair encoding learned from texts; lossless for any text."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError:
        raise missing_package("train_tokenizer", "tokenizers", "train") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class LanguageTask(Task):
    """Next tokens of `pydoc_data.topics`, in windows drawn at random; 1,024 byte-pair tokens, windows of 128.

    Judged by nats per token on held-out topics, every token once, with at most 128 tokens before it; bits per byte are
    the same nats per byte of the text, so that they do not depend on the tokenizer.
    """

    name = "language"
    question = "How well does a small language model with these blocks predict Python's help?"
    metrics = (Metric("nats", "nats/token", ".3f"), Metric("bits", "bits/byte", ".3f"))
    recipe = Recipe(steps=200, rate=1e-2, batch=16, warmup=100)
    rates: ClassVar = dict.fromkeys(("standard", "energy", "convex", "equilibrium"), 1e-2)

    @property
    def standard(self) -> LanguageConfig:
        return LanguageConfig()

    def build(self, config: Any) -> LanguageModel:
        return LanguageModel(config)

    @cached_property
    def corpus(self) -> TextSplits:
        return corpus()

    @cached_property
    def tokenizer(self):
        """Learned from the training part, the same at every run."""
        return train_tokenizer(self.corpus.train, self.standard.vocabulary)

    @cached_property
    def stream(self) -> Tensor:
        """All tokens of the training part, one topic after the other."""
        return self._tokens(self.corpus.train)

    @cached_property
    def held_out(self) -> dict[str, Tensor]:
        """Tokens of the validation and the test part."""
        return {part: self._tokens(getattr(self.corpus, part)) for part in PARTS}

    def _tokens(self, texts: list[str]) -> Tensor:
        end = self.tokenizer.token_to_id(END)
        return torch.tensor([t for text in self.tokenizer.encode_batch(texts) for t in (end, *text.ids)])

    @property
    def fingerprint(self) -> str:
        text = json.dumps([self.corpus, self.tokenizer.to_str()])
        return hashlib.sha256(text.encode()).hexdigest()

    def files(self) -> dict[str, str]:
        """The tokenizer, as transformers reads it."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.standard.context,
            "eos_token": END,
            "pad_token": END,
        }
        return {"tokenizer.json": self.tokenizer.to_str(), "tokenizer_config.json": json.dumps(config, indent=1)}

    def loss(self, model: LanguageModel, batch: int, generator: torch.Generator) -> Tensor:
        width = model.config.context + 1
        starts = torch.randint(len(self.stream) - width + 1, (batch, 1), generator=generator)
        windows = self.stream[starts + torch.arange(width)]  # (batch, context + 1)
        windows = windows.to(device_of_model(model))
        return model.loss(windows[:, :-1], windows[:, 1:])

    @torch.no_grad()
    def evaluate(self, model: LanguageModel, part: str = "test") -> dict[str, float]:
        stream = self.held_out[part]
        inputs, targets = windows_of(stream, model.config.context)
        device = device_of_model(model)
        parts = zip(inputs.to(device).split(32), targets.to(device).split(32), strict=True)
        nats = sum(float(model.loss(x, y, reduction="sum")) for x, y in parts)
        size = sum(len(text.encode()) for text in getattr(self.corpus, part))
        return {"nats": nats / (len(stream) - 1), "bits": nats / math.log(2) / size}


def windows_of(stream: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """A stream cut so that each token but the first is a target once: inputs and targets, (windows, context).

    >>> inputs, targets = windows_of(torch.arange(6), 3)
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2], [3, 4, 0]], [[1, 2, 3], [4, 5, -100]])
    """
    count = len(stream) - 1
    rows = -(-count // context)
    inputs, targets = stream.new_zeros(rows * context), stream.new_full((rows * context,), IGNORED)
    inputs[:count], targets[:count] = stream[:-1], stream[1:]
    return inputs.view(rows, context), targets.view(rows, context)
