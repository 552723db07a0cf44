"""Retrieval stress: facts hidden in a filler text, and questions that come after the compressed part.

Four of them in one prefix, each hidden at its own depth and asked for alone: a code, a list of words, a passage to copy
and pairs of keys and values. The model is given the answer token by token (teacher forcing), and right is a token that
it holds most likely. What the model itself cannot do with its full cache is shown beside it.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence

TASKS = ("code", "word list", "copy", "key–value")
DEPTHS = (0.1, 0.3, 0.5, 0.7)  # of the prefix, in turn for each task from one text to the next
WORDS = (
    *("river", "copper", "window", "garden", "pepper", "island", "candle", "ladder", "bridge", "pencil", "forest"),
    *("carpet", "button", "orange", "hammer", "violin", "rocket", "marble", "basket", "saddle", "lantern", "tunnel"),
    *("feather", "anchor", "blanket", "cabin", "dragon", "engine", "fiddle", "glacier", "harbor", "jacket", "kettle"),
    *("lemon", "mirror", "needle", "oyster", "pillow", "quartz", "ribbon", "shovel", "ticket", "umbrella", "valley"),
)


class Question(NamedTuple):
    """What is hidden and what is asked.

    task     one of `TASKS`
    hidden   text that stands in the prefix
    asked    parts of the text that comes after it: (words, whether they are part of the answer)
    """

    task: str
    hidden: str
    asked: tuple[tuple[str, bool], ...]


class RetrievalPrefix(NamedTuple):
    """A filler text with four facts in it, and the questions.

    input_ids  (T,)
    questions  task → tokens (n,) that follow the prefix, and (n,) True where one belongs to the answer
    hidden     task → the first and the last position of what is hidden, in the prefix
    """

    input_ids: Tensor
    questions: dict[str, tuple[Tensor, Tensor]]
    hidden: dict[str, tuple[int, int]]


def questions(number: int) -> list[Question]:
    """The four questions of text ``number``: the same for everyone, other words and digits in every text.

    >>> [question.task for question in questions(0)] == list(TASKS)
    True
    """
    draw = random.Random(f"retrieval {number}")
    code = "".join(draw.choice("0123456789") for _ in range(8))
    listed = ", ".join(draw.sample(WORDS, 8))
    passage = draw.sample(WORDS, 24)
    first, rest = " ".join(passage[:6]), " " + " ".join(passage[6:])
    keys = draw.sample(WORDS, 8)
    pairs = {key: "".join(draw.choice("0123456789") for _ in range(4)) for key in keys}
    asked = draw.sample(keys, 4)
    lines = "\n".join(f"{key}: {value}" for key, value in pairs.items())
    opening, listing = "The secret access code is", "The list of words to remember:"
    lookups = [part for key in asked for part in ((f"\n{key}:", False), (f" {pairs[key]}", True))]
    return [
        Question("code", f"\n\n{opening} {code}.\n\n", ((f"\n\n{opening}", False), (f" {code}", True))),
        Question("word list", f"\n\n{listing} {listed}.\n\n", ((f"\n\n{listing}", False), (f" {listed}", True))),
        Question("copy", f"\n\n{first}{rest}.\n\n", ((f"\n\n{first}", False), (rest, True))),
        Question("key–value", f"\n\n{lines}\n\n", (("\n", False), *lookups)),
    ]


def retrieval_prefix(tokenizer: Any, filler: Tensor, length: int, number: int) -> RetrievalPrefix:
    """The questions of text ``number`` in a prefix of ``length`` tokens that is otherwise ``filler``, at least as long.

    A fact is hidden at 0.1, 0.3, 0.5 or 0.7 of the prefix, another in each of four texts.
    """
    asked = questions(number)
    hidden = [_ids(tokenizer, question.hidden) for question in asked]
    room = length - sum(map(len, hidden))
    if room < length // 4 or len(filler) < room:
        needed = 4 * sum(map(len, hidden)) // 3
        got = f"{length}, with {len(filler)} tokens of text"
        advice = "Take a longer prefix and longer texts, or leave retrieval out."
        raise ValueError(sentence("retrieval.prefix", f"at least {needed} tokens", got, advice))
    order = sorted(range(len(asked)), key=lambda i: (i + number) % len(asked))
    parts, used, places = [], 0, {}
    for depth, i in zip(DEPTHS, order, strict=True):
        upto = int(depth * room)
        parts += [filler[used:upto], torch.tensor(hidden[i])]
        used = upto
        end = sum(map(len, parts))
        places[asked[i].task] = end - len(hidden[i]), end - 1
    parts.append(filler[used:room])
    return RetrievalPrefix(torch.cat(parts), {q.task: _question(tokenizer, q) for q in asked}, places)


def _question(tokenizer: Any, question: Question) -> tuple[Tensor, Tensor]:
    tokens, answer = [], []
    for words, is_answer in question.asked:
        found = _ids(tokenizer, words)
        tokens += found  # spaces and commas are no answer
        answer += [is_answer and any(c.isalnum() for c in tokenizer.decode([token])) for token in found]
    return torch.tensor(tokens), torch.tensor(answer)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def right_answers(logits: Tensor, input_ids: Tensor, answer: Tensor) -> tuple[int, int, bool]:
    """Tokens of the answer that were the most likely ones, tokens of the answer, and whether all were right.

    logits  (n, vocabulary) after each of input_ids (n,); answer (n,) True where a token belongs to the answer

    >>> right_answers(torch.eye(3), torch.tensor([2, 0, 1]), torch.tensor([False, True, True]))
    (2, 2, True)
    """
    right = (logits[:-1].argmax(-1) == input_ids[1:])[answer[1:]]
    return int(right.sum()), len(right), bool(right.all())
