"""The site: Markdown pages and the gallery, executed. `make docs` builds it into docs/_build."""

import inspect
import re
import sys
from importlib.metadata import version as installed
from pathlib import Path
from tempfile import TemporaryDirectory

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.docstrings import to_rst

project = "cumulant"
copyright = "the cumulant authors"
release = version = installed("cumulant")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["_build"]
autodoc_typehints = "none"  # shapes are in the text; annotations repeat them in another notation
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
add_module_names = False
toc_object_entries_show_parents = "hide"
default_role = "literal"
html_title = "cumulant"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "description": "Attention is the mean of an exponential family",
    "page_width": "1180px",  # below it the theme has one column
    "body_max_width": "none",
    "sidebar_width": "250px",
    "show_relbars": True,
    "fixed_sidebar": True,
}
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]  # functions in the configuration cannot be pickled

READING_ORDER = [
    "attention_is_a_tilted_mean",
    "fisher_is_the_covariance_of_attention",
    "algebra_of_measures",
    "mixture_or_convolution",
    "condensation",
    "hopfield_phases",
    "contrastive_loss_is_a_fenchel_young_gap",
    "bregman_orders",
    "near_the_hull",
    "expansion_and_contraction",
    "gaussian_equilibrium",
    "phase_diagram",
    "clusters_on_the_sphere",
    "metastability",
    "pre_norm_and_post_norm",
    "switching_filters",
    "manoeuvring_target",
    "attention_as_a_filter",
    "switching_counts",
    "gibbs_and_mean_iteration",
    "hopfield_digits",
    "energy_block",
    "convex_inverse",
    "entropy_collapse",
]
SCRATCH = TemporaryDirectory(prefix="cumulant-gallery-")


def position(name: str) -> tuple[int, str]:
    """Scripts in reading order, then the others by name."""
    stem = Path(name).stem.removeprefix("plot_")
    return (READING_ORDER.index(stem) if stem in READING_ORDER else len(READING_ORDER), stem)


def file_name(gallery_conf: dict, script_vars: dict) -> list[str]:
    """A script draws when it is given a file name; the figure it leaves open is the one on the page."""
    return [str(Path(SCRATCH.name, "figure.png"))]


sphinx_gallery_conf = {
    "examples_dirs": "../gallery",
    "gallery_dirs": "gallery",
    "within_subsection_order": position,
    "reset_argv": file_name,
    "image_srcset": ["2x"],
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": float("inf"),
}


def link_to_pages(app, docname: str, source: list[str]) -> None:
    """Links to scripts, as a reader of the repository needs them, lead to their pages on the site."""
    source[0] = source[0].replace("(../gallery/)", "(gallery/index.rst)")
    source[0] = re.sub(r"\(\.\./gallery/(plot_\w+)\.py\)", r"(gallery/\1.rst)", source[0])


def register_anchors(app, doctree) -> None:
    """Anchors written as <a id="…"></a>, which GitHub understands, are link targets as headings are."""
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for node in doctree.findall(nodes.raw):
        slugs.update({anchor: (node.line, anchor, anchor) for anchor in re.findall(r'<a id="([^"]+)">', node.astext())})


def as_rst(app, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text; a constant has none of its own, only that of its type.

    Where one leads to the docstring of its module, that is put below it.
    """
    if what == "data":
        lines[:] = []
        return
    below: list[str] = []
    if "(module docstring" in (text := "\n".join(lines)):
        lines[:] = text.replace("(module docstring", "(below").splitlines()
        below = inspect.cleandoc(sys.modules[obj.__module__].__doc__ or "").splitlines()
    lines[:] = [*to_rst(lines), *to_rst(below)]


def skip_fields(app, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Fields of records are described in the text of the record."""
    return True if type(obj).__name__ in ("_tuplegetter", "member_descriptor") else None


def setup(app) -> None:
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("source-read", link_to_pages)
    app.connect("doctree-read", register_anchors)
