"""What was measured on one window, and its file: tensors by name, and the rest as JSON in their metadata."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from cumulant.cache.audit.head_errors import HeadErrors
from cumulant.cache.audit.token_errors import TokenErrors
from cumulant.checks import sentence
from cumulant.files import replacing

FORMAT = "cumulant cache audit window 1"
Answers = dict[str, tuple[int, int, bool]]  # task → tokens that are right, tokens asked for, whether all are right


class Method(NamedTuple):
    """A compressor by name, and the share of bytes that it was allowed."""

    name: str
    keep: float


Prediction = tuple[str, float]  # a token and its probability
Look = tuple[int, float]  # a position of the prefix and the attention that it had


class WorstToken(NamedTuple):
    """A token whose prediction a compressed cache changed most.

    position    in the window
    kl          nats between the predictions of what follows it
    full        the most likely tokens after it with the full cache
    compressed  with the compressed one
    lost        positions of the prefix that are not held, with the attention that all heads paid them, on average
    """

    position: int
    kl: float
    full: tuple[Prediction, ...]
    compressed: tuple[Prediction, ...]
    lost: tuple[Look, ...]


class MethodResult(NamedTuple):
    """A method at a budget on one window.

    heads    sums over queries, (layers, heads)
    tokens   of the continuation
    held     (T,) share of key heads that hold a token as it was
    lost     (T,) attention that heads paid with the full cache to a token that they do not hold, the mean over all
    bytes    held, of full bytes
    seconds  of the compressor
    answers  to the questions; {} where none were asked
    """

    heads: HeadErrors
    tokens: TokenErrors
    held: Tensor
    lost: Tensor
    bytes: int
    full: int
    seconds: float
    answers: Answers
    worst: tuple[WorstToken, ...]


class WindowResult(NamedTuple):
    """One window with all methods.

    input_ids  (T + n + 1,)
    tokens     their strings
    nll        (n,) of the continuation with the full cache
    attention  (T,) that the tokens of the prefix drew with the full cache, the mean over queries, heads and layers
    methods    by name and budget
    answers    with the full cache
    seconds    prefill, full, compressed (passes over the continuation) and statistics
    """

    document: int
    name: str
    kind: str
    input_ids: Tensor
    tokens: tuple[str, ...]
    nll: Tensor
    attention: Tensor
    methods: dict[Method, MethodResult]
    answers: Answers
    seconds: dict[str, float]

    def save(self, path: Path) -> None:
        """Write a file of safetensors, in one step."""
        from safetensors.torch import save_file

        tensors = {"input_ids": self.input_ids, "nll": self.nll, "attention": self.attention}
        rows = []
        for number, (method, result) in enumerate(self.methods.items()):
            parts = {"heads": vars(result.heads), "tokens": vars(result.tokens)}
            for part, named in parts.items():
                tensors |= {f"{number}/{part}/{name}": tensor for name, tensor in named.items()}
            tensors |= {f"{number}/held": result.held, f"{number}/lost": result.lost}
            plain = {name: getattr(result, name) for name in ("bytes", "full", "seconds", "answers", "worst")}
            rows.append([*method, plain])
        about = [self.document, self.name, self.kind, self.answers, self.seconds, self.tokens]
        metadata = {"format": FORMAT, "about": json.dumps(about), "methods": json.dumps(rows)}
        with replacing(path) as draft:
            save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, draft, metadata)

    @classmethod
    def load(cls, path: Path) -> WindowResult:
        """The inverse of `save`."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dictionary
        except SafetensorError as error:
            advice = "Delete it, and run the audit again."
            raise ValueError(sentence(str(path), "a window of an audit", str(error), advice)) from None
        if metadata.get("format") != FORMAT:
            advice = "Delete it, and run the audit again with this version."
            raise ValueError(sentence(str(path), FORMAT, repr(metadata.get("format")), advice))
        methods = {}
        for number, (name, keep, plain) in enumerate(json.loads(metadata["methods"])):
            methods[Method(name, keep)] = _method(number, tensors, plain)
        document, name, kind, answers, seconds, strings = json.loads(metadata["about"])
        ids, nll, attention = (tensors[part] for part in ("input_ids", "nll", "attention"))
        return cls(document, name, kind, ids, tuple(strings), nll, attention, methods, _answers(answers), seconds)


def _method(number: int, tensors: dict[str, Tensor], plain: dict) -> MethodResult:
    heads = HeadErrors(**{f.name: tensors[f"{number}/heads/{f.name}"] for f in fields(HeadErrors)})
    tokens = TokenErrors(**{f.name: tensors[f"{number}/tokens/{f.name}"] for f in fields(TokenErrors)})
    worst = tuple(
        WorstToken(at, kl, *(tuple((first, share) for first, share in part) for part in parts))
        for at, kl, *parts in plain["worst"]
    )
    held, lost = tensors[f"{number}/held"], tensors[f"{number}/lost"]
    sizes = plain["bytes"], plain["full"], plain["seconds"]
    return MethodResult(heads, tokens, held, lost, *sizes, _answers(plain["answers"]), worst)


def _answers(plain: dict) -> Answers:
    return {task: (right, asked, exact) for task, (right, asked, exact) in plain.items()}


def merged_heads(results: list[MethodResult]) -> HeadErrors:
    """Sums over several windows."""
    whole = results[0].heads
    for result in results[1:]:
        whole = whole.plus(result.heads)
    return whole
