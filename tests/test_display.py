"""Objects show themselves in a line, and in a notebook in a small table: shapes and ranges, never all numbers."""

from html.parser import HTMLParser

import pytest
import torch

from cumulant import Box, Empirical, Gaussian, Sphere, fixed_point, moments
from cumulant.dynamics import Ascend, Layer, SphereNorm, run
from cumulant.filters import SwitchingLinearGaussian, imm

LARGE = torch.randn(3, 200, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def filtered():
    eye = torch.eye(1, dtype=torch.float64)
    start = {"initial_mean": torch.zeros(1).double(), "initial_covariance": eye}
    stay, noise = torch.full((2, 2), 0.5).double(), torch.stack([eye, 9 * eye])
    walk = SwitchingLinearGaussian(stay, eye, noise, eye, eye, **start)
    return imm(walk, torch.zeros(50, 1, dtype=torch.float64))


def observed():
    pytest.importorskip("transformers", reason="install cumulant[hf]")
    from cumulant.nn import MultiheadAttention
    from cumulant.observatory import attach

    layer, x = MultiheadAttention(8, 2, batch_first=True), torch.ones(1, 5, 8)
    with attach(layer) as recorder:
        layer(x, x, x)
    return recorder.record(text="<script>alert(1)</script>")


OBJECTS = {
    "Empirical": (lambda: Empirical(LARGE), "Empirical(atoms=(3, 200, 6) float64, log_weights=None)"),
    "Gaussian": (lambda: Gaussian(torch.zeros(2), torch.eye(2)), "Gaussian(loc=(2) float32, covariance=(2, 2) float32"),
    "sum": (lambda: Box(torch.zeros(2), torch.ones(2)) + Sphere(2), "parts=(Box(low=(2) float32, high=(2) float32)"),
    "Moments": (
        lambda: moments(LARGE, LARGE, sink=0.0),
        "Moments(log_normalizer=(3, 200) float64, atom_mean=(3, 200, 6) float64, ",
    ),
    "Solution": (
        lambda: fixed_point(lambda x: x / 2 + 1, torch.zeros(4, 100, dtype=torch.float64)),
        "Solution(value=(4, 100) float64, converged=4 of 4, steps=33, residual=1.164e-09)",
    ),
    "Filtered": (filtered, "Filtered(batch=(), T=50, M=2, d=1, log_likelihood=(50) float64)"),
    "Trajectory": (
        lambda: run(Layer(ascend=Ascend(), renormalize=SphereNorm()), LARGE[0], 3),
        "Trajectory(FINISHED after 3 steps (all steps were taken); ",
    ),
    "Record": (observed, "Record(model: MultiheadAttention, text: <script>alert(1)</script>, tokens: 5, heads: 2"),
}


def html(shown: object) -> str:
    """What a notebook asks for."""
    return getattr(shown, "_repr_html_")()  # noqa: B009


class Tags(HTMLParser):
    """The names of all tags, and the text between them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.mark.parametrize("name", OBJECTS)
def test_a_repr_is_a_line_without_numbers_of_tensors(name):
    make, words = OBJECTS[name]
    text = repr(make())
    assert words in text
    assert "\n" not in text
    assert len(text) < 500
    assert "tensor(" not in text


@pytest.mark.parametrize("name", OBJECTS)
def test_a_notebook_shows_a_table_of_escaped_text(name):
    found = OBJECTS[name][0]()
    shown = Tags(html(found))
    assert set(shown.tags) == {"table", "caption", "tr", "td"}
    assert type(found).__name__ in shown.text
    assert len(shown.text) < 2000


def test_the_table_of_a_solution_says_why_it_stopped():
    found = fixed_point(lambda x: x / 2 + 1, torch.zeros(4, 2, dtype=torch.float64))
    assert "4 of 4: converged within the tolerance" in Tags(html(found)).text


def test_ranges_of_numbers_that_cannot_be_read_are_left_out():
    def shown(x: torch.Tensor) -> torch.Tensor:
        assert "Empirical" in html(Empirical(x))
        return x

    assert torch.func.vmap(shown)(LARGE).shape == LARGE.shape
