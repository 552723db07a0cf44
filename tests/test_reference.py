"""The reference: no public name is missing, each says what it computes and shows it, pages are what is generated."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

hf = pytest.importorskip("transformers", reason="install cumulant[hf]: the reference has the names that need it")
pytest.importorskip("polars", reason="install cumulant[report]")

from cumulant.filters.tracking.table import TableColumns  # noqa: E402
from docs.docstrings import to_rst  # noqa: E402
from docs.generate import api, columns, commands, tracking  # noqa: E402

ROOT = Path(__file__).parents[1]
NAMES = {item.path: item.value for items in api.public_names().values() for item in items}
EQUATION_OR_SHAPES = re.compile(
    r"[=≤≥∇Σ∫⟨√‖→∝≈∈^Γψ]|\|[^|]+\||\(\*?\w*batch|\([\w…+−·]+(?: \| \w+)?,[^)]*\)|p\([^)]*\|"
)

# records that a function returns, protocols and abstract classes: the example is where they are made or used
SHOWN_BY = {
    "cumulant.Attended": "cumulant.attend",
    "cumulant.Measure": "cumulant.per_query",
    "cumulant.Ranks": "cumulant.sharded_moments",
    "cumulant.Sharded": "cumulant.shard",
    "cumulant.Solution": "cumulant.fixed_point",
    "cumulant.boltzmann.Gradient": "cumulant.boltzmann.contrastive_divergence",
    "cumulant.cache.Budget": "cumulant.cache.compress_prefix",
    "cumulant.cache.Compressed": "cumulant.cache.compress_prefix",
    "cumulant.cache.Compressor": "cumulant.cache.as_compressor",
    "cumulant.cache.LayerPrefix": "cumulant.cache.prefill",
    "cumulant.cache.Prefix": "cumulant.cache.prefill",
    "cumulant.cache.on_cumulant": "cumulant.cache.prefill",
    "cumulant.cache.audit.AuditSettings": "cumulant.cache.audit.audit",
    "cumulant.cache.audit.AuditText": "cumulant.cache.audit.audit",
    "cumulant.cache.audit.DamagedHead": "cumulant.cache.audit.audit",
    "cumulant.cache.audit.MethodRow": "cumulant.cache.audit.audit",
    "cumulant.cache.baselines.AdaKV": "cumulant.cache.baselines.baseline",
    "cumulant.cache.baselines.BASELINES": "cumulant.cache.baselines.baseline",
    "cumulant.cache.baselines.D2OLike": "cumulant.cache.baselines.baseline",
    "cumulant.cache.baselines.ExpectedAttention": "cumulant.cache.baselines.baseline",
    "cumulant.cache.baselines.H2O": "cumulant.cache.baselines.baseline",
    "cumulant.cache.baselines.KVzip": "cumulant.cache.baselines.baseline",
    "cumulant.cache.baselines.KeyDiff": "cumulant.cache.baselines.baseline",
    "cumulant.cache.baselines.Knorm": "cumulant.cache.baselines.baseline",
    "cumulant.cache.baselines.SnapKV": "cumulant.cache.baselines.baseline",
    "cumulant.contrastive.Parts": "cumulant.contrastive.alignment_uniformity",
    "cumulant.contrastive.VocabularyLoss": "cumulant.contrastive.linear_cross_entropy",
    "cumulant.duality.Boosting": "cumulant.duality.boosting",
    "cumulant.duality.FreeEnergy": "cumulant.duality.free_energy",
    "cumulant.dynamics.Flow": "cumulant.dynamics.flow",
    "cumulant.dynamics.Renormalize": "cumulant.dynamics.RMSNorm",
    "cumulant.dynamics.Trajectory": "cumulant.dynamics.run",
    "cumulant.families.StateMoments": "cumulant.families.NormalFamily",
    "cumulant.filters.AttentionFilter": "cumulant.filters.attention_as_filter",
    "cumulant.filters.FilterState": "cumulant.filters.init",
    "cumulant.filters.Filtered": "cumulant.filters.gpb",
    "cumulant.filters.Forecast": "cumulant.filters.forecast",
    "cumulant.filters.Consistency": "cumulant.filters.consistency",
    "cumulant.filters.Innovations": "cumulant.filters.innovations",
    "cumulant.filters.Learned": "cumulant.filters.em",
    "cumulant.filters.ProjectedNormal": "cumulant.filters.m_projection",
    "cumulant.filters.Simulation": "cumulant.filters.SwitchingLinearGaussian",
    "cumulant.filters.SinkhornAttention": "cumulant.filters.sinkhorn_attention",
    "cumulant.filters.Smoothed": "cumulant.filters.smooth",
    "cumulant.filters.StepRecord": "cumulant.filters.step",
    "cumulant.filters.tracking.Estimate": "cumulant.filters.tracking.filter_tracks",
    "cumulant.filters.tracking.FirstModel": "cumulant.filters.tracking.first_model",
    "cumulant.filters.tracking.Mode": "cumulant.filters.tracking.read_model",
    "cumulant.filters.tracking.TableColumns": "cumulant.filters.tracking.read_tracks",
    "cumulant.filters.tracking.Track": "cumulant.filters.tracking.read_tracks",
    "cumulant.filters.tracking.TrackModel": "cumulant.filters.tracking.read_model",
    "cumulant.geometry.MaxEntropy": "cumulant.geometry.maximum_entropy",
    "cumulant.hopfield.Capacity": "cumulant.hopfield.capacity",
    "cumulant.hopfield.Retrieval": "cumulant.hopfield.retrieve",
    "cumulant.kernels.AttentionProfile": "cumulant.kernels.attention_profile",
    "cumulant.kernels.STATISTICS": "cumulant.moments",
    "cumulant.link.LinkFit": "cumulant.link.link_fit",
    "cumulant.nn.AttentionCall": "cumulant.nn.on_attention",
    "cumulant.nn.MultiheadAttended": "cumulant.nn.MultiheadAttention",
    "cumulant.nn.Recall": "cumulant.nn.Hopfield",
    "cumulant.observatory.monitor.Action": "cumulant.observatory.monitor.Monitor",
    "cumulant.observatory.monitor.Alarm": "cumulant.observatory.monitor.Monitor",
    "cumulant.observatory.monitor.Check": "cumulant.observatory.monitor.Monitor",
    "cumulant.observatory.monitor.HeadStatistics": "cumulant.observatory.monitor.Monitor",
    "cumulant.potentials.Potential": "cumulant.potentials.ReluSquare",
    "cumulant.regression.ApproximateAttention": "cumulant.regression.approximate_attention",
    "cumulant.regression.Regression": "cumulant.regression.nadaraya_watson",
    "cumulant.residual.AscentStep": "cumulant.residual.ascend",
    "cumulant.samplers.Diagnosis": "cumulant.samplers.diagnose",
    "cumulant.samplers.SampledSmoothed": "cumulant.samplers.sample_smooth",
    "cumulant.special.Hyp0F1": "cumulant.special.hyp0f1",
    "cumulant.special.Radial": "cumulant.special.bessel_radial",
    "cumulant.testing.Law": "cumulant.testing.sampling_law",
    "cumulant.transformers.AttentionMoments": "cumulant.transformers.on_attention",
    "cumulant.transformers.AttentionObserver": "cumulant.transformers.on_attention",
}
PROTOCOL = "a protocol or a hook for models and measures of one's own"
WARNING = "a warning or an error, which is raised and not called"
PAPER = "plain data or the runner of `cumulant verify` and `cumulant experiment`, which docs/claims.md shows"
CHECKPOINT = "reads what `cumulant train` wrote in a training of minutes"
STATEMENTS = ("ADDED", "MESSAGES", "POSTER", "RELATED", "STATEMENTS", "THEORY")
VERIFY = ("CHECKS", "Evidence", "NumericalCheck", "Outcome", "Statement", "Verdict", "run_check", "verify")
EXPERIMENTS = ("EXPERIMENTS", "Expectation", "Experiment", "Result", "find")
WITHOUT_EXAMPLE = {
    "cumulant.measures.Hull": PROTOCOL,
    "cumulant.dynamics.Dynamics": PROTOCOL,
    "cumulant.filters.Propagator": PROTOCOL,
    "cumulant.filters.SwitchingModel": PROTOCOL,
    "cumulant.dynamics.NormalizationError": WARNING,
    "cumulant.filters.SmootherWarning": WARNING,
    "cumulant.observatory.monitor.MonitorWarning": WARNING,
    "cumulant.observatory.monitor.ClipWarning": WARNING,
    "cumulant.observatory.monitor.Reaction": PROTOCOL,
    "cumulant.observatory.monitor.MonitorCallback": "takes part in a training by transformers; a notebook shows it",
    "cumulant.observatory.monitor.AccelerateWriter": "writes to the trackers of accelerate",
    "cumulant.observatory.monitor.TensorBoard": "writes event files for a program with a page of its own",
    "cumulant.paper.trainings.Checkpoint": CHECKPOINT,
    "cumulant.paper.trainings.load_checkpoint": CHECKPOINT,
    **dict.fromkeys((f"cumulant.paper.statements.{name}" for name in STATEMENTS), PAPER),
    **dict.fromkeys((f"cumulant.paper.verify.{name}" for name in VERIFY), PAPER),
    **dict.fromkeys((f"cumulant.paper.experiments.{name}" for name in EXPERIMENTS), PAPER),
}
# they hold, load, write or choose something, and compute no number of an equation
NO_COMPUTATION = {
    *WITHOUT_EXAMPLE,
    *("cumulant.Ranks", "cumulant.Status", "cumulant.kernels.STATISTICS", "cumulant.dynamics.Halt"),
    *("cumulant.filters.FilterState", "cumulant.filters.StepRecord", "cumulant.filters.EXACT", "cumulant.filters.IMM"),
    *(f"cumulant.filters.tracking.{name}" for name in ("Estimate", "TableColumns", "TrackModel", "read_model")),
    *(f"cumulant.filters.tracking.{name}" for name in ("filter_tracks", "read_tracks", "FirstModel", "first_model")),
    *(f"cumulant.observatory.{name}" for name in ("load", "observe", "read_texts", "render", "attach")),
    *(f"cumulant.observatory.monitor.{name}" for name in ("Alarm", "Check", "CheckHistory", "CheckWriter", "Monitor")),
    "cumulant.observatory.monitor.Action",
    *("cumulant.transformers.AttentionObserver", "cumulant.training.LanguageConfig", "cumulant.nn.swap"),
    *("cumulant.nn.on_attention", "cumulant.filters.Slots", "cumulant.filters.init"),
    *("cumulant.cache.baselines.baseline", "cumulant.cache.audit.AuditText"),
}


def own_docstring(value: object) -> str:
    """Of a name itself; a constant has that of its type."""
    return inspect.getdoc(value) or ""


def docstrings(value: object) -> list[str]:
    """Of a name, and of a class those of its public methods too."""
    members = vars(value).items() if inspect.isclass(value) else ()
    return [own_docstring(value), *(inspect.getdoc(m) or "" for name, m in members if not name.startswith("_"))]


def has_example(value: object) -> bool:
    return any(">>>" in text for text in docstrings(value))


def test_every_public_name_is_on_one_page():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    listed = re.findall(r"^\.\. auto(?:class|exception|function|data):: (\S+)$", text, re.M)
    assert sorted(listed) == sorted(NAMES)
    assert len(listed) > 250


MODULES = ["cumulant", *(f"cumulant.{module}" for page in api.PAGES.values() for module in page.modules)]


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_exports_is_in_the_reference(module):
    values = {id(value) for value in NAMES.values()}
    found = importlib.import_module(module)
    for name in api.names_of(found):
        assert id(getattr(found, name)) in values, name


def test_every_import_on_the_pages_is_of_a_name_in_the_reference():
    """What README and docs import from `cumulant` is public, or a module of its own."""
    values = {id(value) for value in NAMES.values()}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    imports = [
        (module, name.split(" as ")[0].strip())
        for page in pages
        for module, names in re.findall(r"from (cumulant[\w.]*) import ([\w, ]+)", page.read_text(encoding="utf-8"))
        for name in names.split(",")
        if name.strip()
    ]
    assert len(imports) > 20
    found = {f"{module}.{name}": _imported(module, name) for module, name in imports}
    inner = {path for path, value in found.items() if not inspect.ismodule(value) and id(value) not in values}
    assert inner == INNER


# names of inner modules that pages import, with no promise that they stay
INNER = {f"cumulant.kernels.native.library.{name}" for name in ("library", "why_not")}


def _imported(module: str, name: str) -> object:
    found = getattr(importlib.import_module(module), name, None)
    return found if found is not None else importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("path", NAMES)
def test_every_name_has_a_first_sentence(path):
    first = own_docstring(NAMES[path]).split("\n\n")[0]
    assert len(first) > 8
    assert inspect.isroutine(NAMES[path]) or "Alias for" not in first


@pytest.mark.parametrize("path", [name for name in NAMES if name not in WITHOUT_EXAMPLE])
def test_every_name_has_an_executed_example(path):
    shown = SHOWN_BY.get(path, path)
    assert has_example(NAMES[shown]), f"{path}: add a doctest, or say in SHOWN_BY which name shows it"


@pytest.mark.parametrize("path", [name for name in NAMES if name not in NO_COMPUTATION])
def test_every_name_that_computes_has_an_equation_or_shapes(path):
    text = own_docstring(NAMES[path]).split(">>>")[0]
    assert EQUATION_OR_SHAPES.search(text), f"{path}: {text}"


def test_exceptions_are_names_of_the_reference_that_need_them():
    assert set(SHOWN_BY) | set(WITHOUT_EXAMPLE) | NO_COMPUTATION <= NAMES.keys()
    assert not [name for name in (*SHOWN_BY, *WITHOUT_EXAMPLE) if has_example(NAMES[name])]


@pytest.mark.parametrize("module", [api, columns, commands, tracking], ids=lambda module: module.__name__)
def test_committed_pages_are_what_is_generated(module):
    for name, text in module.pages().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, f"{name}: run python -m docs.generate"


def test_the_page_of_the_model_file_has_every_key():
    text = tracking.pages()["tracking.md"]
    keys = [name for name in TableColumns._fields if name not in ("sensors", "truth")]
    assert all(f"| `{key}` |" in text for key in (*keys, "transition", "q", "start", "range", "std", "velocity_std"))
    assert all(f"## `{table}`" in text for table in ("[table]", "[[sensor]]", "[truth]"))
    assert {line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("|")} == {3, 4, 5}


def test_docstrings_become_text_that_sphinx_does_not_misread():
    doc = ["The law |x| of (*batch, d).", "", "    G = log Σ", "", "eta  (*batch, d) of", "     queries"]
    assert to_rst([*doc, "Others as in `f`.", "", ">>> 1 + 1", "2"]) == [
        *("The law \\|x\\| of (\\*batch, d).", "", ".. code-block:: text", "", "    G = log Σ", ""),
        *("``eta``", "    (\\*batch, d) of", "    queries", "", "Others as in ``f``.", "", ">>> 1 + 1", "2", ""),
    ]
