"""Texts of an audit, and what is hidden in them and asked for."""

import pytest
import torch

from tests.cache.prefixes import characters

pytest.importorskip("safetensors", reason="install cumulant[hf] for caches")

from cumulant.cache.audit import AuditText
from cumulant.cache.audit.retrieval import TASKS, questions, retrieval_prefix, right_answers
from cumulant.cache.audit.texts import default_documents, windows


def test_questions_can_be_answered_from_what_is_hidden():
    for number in range(3):
        for question in questions(number):
            for words, is_answer in question.asked:
                if is_answer:
                    assert words.strip() in question.hidden
    assert questions(0) != questions(1)


def test_a_retrieval_prefix_has_its_length_and_its_facts():
    tokenizer = characters()
    filler = torch.tensor([ord(c) for c in "abc " * 1000])
    depths, tasks = set(), set()
    for number in range(4):
        found = retrieval_prefix(tokenizer, filler, 2000, number)
        tasks |= {*found.questions}
        assert found.input_ids.shape == (2000,)
        text = "".join(map(chr, found.input_ids.tolist()))
        for question in questions(number):
            first, last = found.hidden[question.task]
            assert text[first : last + 1] == question.hidden
            tokens, answer = found.questions[question.task]
            assert "".join(map(chr, tokens.tolist())) == "".join(words for words, _ in question.asked)
            answered = "".join(map(chr, tokens[answer].tolist()))
            assert answered.isalnum()
        depths.add(tuple(sorted(found.hidden, key=lambda task: found.hidden[task])))
    assert len(depths) == 4
    assert tasks == {*TASKS}


def test_right_answers_are_counted_on_the_answer_alone():
    logits = torch.nn.functional.one_hot(torch.tensor([1, 2, 9, 4, 0]), 10).float()
    assert right_answers(logits, torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 0, 1, 1, 1]).bool()) == (2, 3, False)


def test_every_python_has_texts_of_several_kinds():
    documents = default_documents(4000, 4)
    kinds = {document.kind for document in documents}
    assert {"code", "help"} <= kinds
    assert all(len(document.text) >= 4000 for document in documents)
    assert len({document.name for document in documents}) == len(documents)


def test_windows_take_kinds_in_turn_and_pass_over_what_is_short():
    texts = [AuditText(f"{kind}{i}", kind, kind * (20 + 100 * i)) for kind in "ab" for i in range(3)]
    found = windows(texts, characters(), 60, 20, 3)
    assert [window.name for window in found] == ["a1", "b1", "a2"]
    assert [window.document for window in found] == [0, 1, 2]
    assert all(window.input_ids.shape == (81,) for window in found)
    with pytest.raises(ValueError, match=r"audit\.texts: expected a text of at least 2021 tokens, got 6 texts"):
        windows(texts, characters(), 2000, 20, 3)
