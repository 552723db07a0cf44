"""docs/models.md says what becomes of every architecture of transformers."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")

from docs.generate import models  # noqa: E402
from tests.observatory.architectures import architectures, observe_architecture, shrunk  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_a_configuration_is_small_in_all_of_its_parts():
    sizes = shrunk(hf.CLIPConfig())
    assert sizes["text_config"]["hidden_size"] == sizes["vision_config"]["hidden_size"] == 32
    assert sizes["vision_config"]["image_size"] == 32
    assert sizes["text_config"]["num_hidden_layers"] == 2
    assert sizes["text_config"]["eos_token_id"] < sizes["text_config"]["vocab_size"]


@pytest.mark.parametrize(
    ("kind", "verdict", "reason"),
    [
        ("llama", "works", ""),
        ("mamba", "refused", "it has no attention: its layers are MambaBlock"),
        ("gpt_neo", "refused", "its attention is written out in its own code"),
    ],
)
def test_outcomes_of_architectures_that_are_known(kind, verdict, reason):
    outcome = observe_architecture(kind)
    assert outcome.verdict == verdict, outcome.reason
    assert outcome.reason.startswith(reason)
    assert re.search(rf"^\| `{kind}` \|.*$", PAGE.read_text(encoding="utf-8"), re.M)
    if verdict == "works":
        assert (outcome.modules, outcome.heads, outcome.states) == (2, 8, True)


def test_an_architecture_that_fails_does_not_end_the_run(monkeypatch):
    from tests.observatory import architectures as module

    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    outcome = observe_architecture("bert")
    assert outcome.verdict == "not tried"
    assert "above" in outcome.reason


def test_the_page_has_every_architecture_once_and_their_number():
    text = PAGE.read_text(encoding="utf-8")
    if f"of transformers {version('transformers')} " not in " ".join(text.split()):
        pytest.skip("the page is of another transformers")
    listed = re.findall(r"^\| `([^`]+)` \|", text, re.M)
    assert sorted(listed) == sorted(architectures())
    headings = dict(re.findall(r"^## (\w+(?: \w+)?): (\d+)$", text, re.M))
    assert sum(map(int, headings.values())) == len(listed)
    assert int(headings["Works"]) > 280


@pytest.mark.long
def test_the_page_is_what_a_run_writes():
    text = PAGE.read_text(encoding="utf-8")
    if f"of transformers {version('transformers')} " not in " ".join(text.split()):
        pytest.skip("the page is of another transformers")
    assert models.pages()["models.md"] == text
