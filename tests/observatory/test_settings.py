"""Options of `cumulant observe` that contradict each other are refused in one sentence; the others have defaults."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from cumulant.observatory.runs.settings import NULLS, ObservationSettings, Settings, null_names

TINY = ObservationSettings("models/tiny")
SERIES = {"checkpoints": Path("trained/language/convex/seed-0")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causes": 5}, "--causes: expected 0 for none, or at least 16, got 5"),
        (SERIES | {"causes": 64}, "--causes: expected no --checkpoints beside it, got both"),
        ({"sources": ("-",), "causes": 64}, "--causes: expected texts that can be read twice"),
        ({"ablation": "gauss"}, "--ablate: expected gaussian or mixture, got 'gauss'"),
        ({"max_tokens": 15}, "--max-tokens: expected 0 for everything, or at least 16, got 15"),
        ({"resume": True, "force": True}, "--resume: expected no --force beside it, got both"),
        ({"workers": 2}, "--workers: expected --ray beside it, got none"),
        ({"nulls": ("gaussian",)}, "--null: expected random, shuffled or none, got 'gaussian'"),
        ({"nulls": ("none", "random")}, "--null: expected none alone, got random beside it"),
        ({"sources": ("-",), "resume": True}, "--resume: expected texts that can be read twice, got standard input"),
        ({"sources": ("-",), "nulls": ("random",)}, "--null: expected texts that can be read twice"),
        ({"sources": ("-",), "column": "text"}, "--column: expected texts that can be read twice"),
        (SERIES | {"ray": "local"}, "--ray: expected no --checkpoints beside it, got both"),
        (SERIES | {"ablation": "mixture"}, "--ablate: expected no --checkpoints beside it, got both"),
        (SERIES | {"sources": ("-",)}, "--checkpoints: expected texts that can be read at every step"),
        (SERIES | {"max_tokens": 0}, "--max-tokens: expected a number of tokens with --checkpoints, got 0"),
    ],
)
def test_contradictions_are_one_sentence(options, message):
    model = ObservationSettings("minilm") if "checkpoints" in options else TINY
    with pytest.raises(ValueError, match=message):
        Settings(model, **options)


def test_a_model_beside_checkpoints_is_refused():
    with pytest.raises(ValueError, match="MODEL: expected no --checkpoints beside it, got both"):
        Settings(TINY, **SERIES)


def test_unknown_quantities_are_refused():
    with pytest.raises(ValueError, match="quantities: expected names among"):
        Settings(TINY._replace(quantities=("entropi",)))


def test_defaults():
    plain, series = Settings(TINY), Settings(ObservationSettings("minilm"), **SERIES)
    assert plain.directory == Path("observed/tiny")
    assert series.directory == Path("observed/convex-seed-0")
    assert (plain.token_limit, series.token_limit) == (20_000, 4000)
    assert Settings(TINY, max_tokens=0).token_limit is None
    assert plain.text_name == "pydoc_data.topics, Python's own help"
    assert null_names(plain.nulls) == NULLS
    assert Settings(TINY, sources=("-",), nulls=("none",)).reads_stdin  # no null needs no second reading
