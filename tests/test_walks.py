"""Three people in their first five minutes, with what the README and the pages give them to type and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
pl = pytest.importorskip("polars", reason="install cumulant[report] to write tables")
testing = pytest.importorskip("typer.testing", reason="install cumulant[cli]")

from cumulant.cli import application  # noqa: E402
from tests.observatory.own_model import save_own_model  # noqa: E402

TEXT = "Attention is the mean of an exponential family, and every head of a model has its own. " * 4


def typed(line: str) -> str:
    """What a command prints, typed in the current directory."""
    done = testing.CliRunner().invoke(application(), line.split()[1:], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_researcher_with_a_model_of_her_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """docs/observe.md: the command, its tables, what a column means; then the same in Python, with a page."""
    monkeypatch.chdir(tmp_path)
    save_own_model(tmp_path / "my-model")
    (tmp_path / "my.txt").write_text(TEXT)
    assert "report.html" in typed("cumulant observe ./my-model --text my.txt --out looks --max-length 128")
    heads = pl.read_parquet("looks/heads.parquet")
    assert heads.height == 2 * 4
    assert heads["entropy"].is_between(0, 128).all()
    assert heads["entropy_null_random"].is_not_null().all()
    assert "−Σⱼ pⱼ log pⱼ" in typed("cumulant columns entropy --table heads")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cumulant.observatory import attach, render

    model, tokenizer = AutoModelForCausalLM.from_pretrained("my-model"), AutoTokenizer.from_pretrained("my-model")
    inputs = tokenizer("one passage of her own", return_tensors="pt")
    with torch.no_grad():
        before = model(**inputs).logits
        with attach(model) as recorder:
            observed = model(**inputs).logits
    assert torch.equal(before, observed)
    record = recorder.record()
    assert record.heads().height == 2 * 4
    assert render(record, "page").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "looks" in typed("cumulant compare looks page")


def test_a_builder_with_a_loss():
    """docs/which-function.md: InfoNCE that is cross-entropy to the last digits, and a vocabulary without its logits."""
    from cumulant.contrastive import info_nce, linear_cross_entropy

    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(64, 16, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    loss = info_nce(image, text, temperature=0.1)
    by_hand = torch.nn.functional.cross_entropy(image @ text.T / 0.1, torch.arange(64))
    torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=1e-12)
    (ours,), (theirs,) = torch.autograd.grad(loss, [image]), torch.autograd.grad(by_hand, [image])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)

    hidden, words = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (10, 1000))
    targets = torch.arange(10)
    ours = linear_cross_entropy(hidden, words, targets)
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(hidden @ words.T, targets), rtol=1e-12, atol=0)


def test_a_tracker_with_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """docs/tracking.md: the example's model with the names of his columns, a row missing and a cell empty."""
    monkeypatch.chdir(tmp_path)
    typed("cumulant track --example demo")
    rows = [
        f"{name},{0.1 * t:.1f},{t * 0.1 + shift},{-t * 0.1}" for name, shift in (("a", 0), ("b", 5)) for t in range(40)
    ]
    rows[7] = "a,0.7,,-0.7"
    del rows[20]
    (tmp_path / "radar.csv").write_text("target,seconds,east,north\n" + "\n".join(rows) + "\n")
    model = (tmp_path / "demo" / "manoeuvre.toml").read_text(encoding="utf-8")
    for example, his in (('"time"', '"seconds"'), ('"track"', '"target"'), ('["x", "y"]', '["east", "north"]')):
        model = model.replace(example, his)
    (tmp_path / "radar.toml").write_text(model, encoding="utf-8")
    typed("cumulant track radar.csv --model radar.toml --smooth --figures 1")
    estimates = pl.read_csv("tracked/radar/estimates.csv")
    assert estimates.height >= 79
    assert {"a", "b"} == set(estimates["track"])
    assert {"east", "east_std", "east_smoothed", "p_manoeuvre"} <= set(estimates.columns)
    assert list((tmp_path / "tracked" / "radar" / "figures").iterdir())
