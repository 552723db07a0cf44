"""Every gallery script runs to its closing assert, writes nothing unless asked, and stays short."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "gallery").glob("*.py"))
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def test_there_are_scripts():
    assert SCRIPTS


# these take seconds
SLOW = """entropy_collapse convex_inverse clusters_on_the_sphere phase_diagram hopfield_digits
expansion_and_contraction metastability gaussian_equilibrium
switching_counts switching_filters pre_norm_and_post_norm prediction_over_depth from_a_radar_table
where_heads_look what_heads_cause cache_as_a_measure compressed_cache clipped_logits""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(s, marks=pytest.mark.long if s.stem.removeprefix("plot_") in SLOW else (), id=s.stem)
        for s in SCRIPTS
    ],
)
def test_what_the_text_claims(script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert not list(tmp_path.iterdir())


@each_script
def test_it_is_short_and_ends_in_an_assert(script: Path):
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert lines[-1].startswith("assert ")
