"""Where the numbers of a monitor go: dictionaries, trackers, logs of trainers, data frames; and what is refused."""

import math
import sys
import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from cumulant.nn import MultiheadAttention, swap
from cumulant.observatory.monitor.history import CheckHistory
from cumulant.observatory.monitor.thresholds import SEVERITY, AlarmDetector, LayerCheck, Thresholds
from cumulant.observatory.monitor.writers import write_check
from cumulant.observatory.statistics.heads import MEANS, HeadStatistics
from cumulant.training import AccelerateWriter, Check, CheckWriter, Monitor, MonitorWarning
from tests.observatory.tiny_models import hooks_of


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def observed_encoder(layers: int = 2) -> nn.TransformerEncoder:
    model = encoder(layers)
    for number in range(layers):
        path = f"layers.{number}.self_attn"
        swap(model, path, MultiheadAttention.of(model.get_submodule(path)))
    return model


def tokens() -> torch.Tensor:
    return torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))


def train(monitor: Monitor, steps: int) -> None:
    for _ in range(steps):
        monitor.model(tokens()).square().mean().backward()
        monitor.step()


def layer_check(*, name: str = "a", expansion: float = 1.0, **changed) -> LayerCheck:
    means = {field: torch.full((2,), 0.5, dtype=torch.float64) for field in MEANS} | changed
    heads = HeadStatistics(**means, queries=4)
    nobody = torch.zeros(2, dtype=torch.bool)
    return LayerCheck(name, heads, expansion, nobody, torch.tensor([False, True]))


def test_scalars_have_the_numbers_of_the_check_under_stable_names():
    monitor = Monitor(observed_encoder(), every=1)
    train(monitor, 1)
    check = monitor.history[0]
    scalars = check.scalars()
    for number, layer in enumerate(check.layers):
        for head in range(2):
            for name in MEANS:
                value = float(getattr(layer.heads, name)[head])
                key = f"attention/layer{number:02}/head{head:02}/{name}"
                assert scalars.get(key) == (value if math.isfinite(value) else None)
        assert scalars[f"attention/layer{number:02}/expansion"] == layer.expansion > 0
        assert scalars[f"attention/layer{number:02}/dead_heads"] == float(layer.dead.sum())
    assert not any(name.endswith("sink_mass") for name in scalars)  # there is no sink
    assert 0 < scalars["attention/layer01/head01/entropy"] <= math.log(6)
    lone = Check(3, (layer_check(expansion=math.nan),)).scalars()
    assert lone["attention/layer00/collapsed_heads"] == 1.0
    assert "attention/layer00/expansion" not in lone


def test_any_callable_gets_the_scalars_and_the_step():
    written: list[dict[str, float]] = []
    monitor = Monitor(observed_encoder(), every=2, writer=written.append)
    train(monitor, 5)
    assert [row["step"] for row in written] == [0, 2, 4]
    assert written == [check.scalars() | {"step": check.step} for check in monitor.history]


def test_a_check_writer_gets_the_check():
    class Keep(CheckWriter):
        def __init__(self):
            self.checks = []

        def __call__(self, check: Check) -> None:
            self.checks.append(check)

    keep, check = Keep(), Check(7, ())
    write_check(keep, check)
    assert keep.checks[0] is check


def test_accelerate_writes_at_the_step_of_the_check(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="install cumulant[hf]")
    pytest.importorskip("tensorboard", reason="install cumulant[monitor]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    monitor = Monitor(observed_encoder(), every=2, writer=AccelerateWriter(accelerator))
    train(monitor, 3)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    points = events.Scalars("attention/layer01/head00/entropy")
    entropies = [float(check.layers[1].heads.entropy[0]) for check in monitor.history]
    assert [point.step for point in points] == [0, 2]
    assert [point.value for point in points] == pytest.approx(entropies, rel=1e-6)
    with pytest.raises(TypeError, match=r"AccelerateWriter.accelerator: expected an accelerate.Accelerator, got int"):
        AccelerateWriter(3)


def tiny_trainer(tmp_path, **options):
    hf = pytest.importorskip("transformers", reason="install cumulant[hf]")
    pytest.importorskip("accelerate", reason="install cumulant[hf]")
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0)
    ids = torch.randint(1, 40, (8, 9), generator=torch.Generator().manual_seed(1))
    fixed = {"per_device_train_batch_size": 2, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = hf.TrainingArguments(str(tmp_path / "out"), max_steps=5, **fixed, **options)
    items = [{"input_ids": row, "labels": row} for row in ids]
    return hf.Trainer(hf.GPT2LMHeadModel(config), arguments, train_dataset=items)


def test_the_log_of_a_trainer_gets_the_scalars_and_keeps_its_losses(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="install cumulant[monitor]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    trainer = tiny_trainer(tmp_path, report_to=["tensorboard"], logging_strategy="steps", logging_steps=1)
    from cumulant.training import MonitorCallback

    monitor = Monitor(trainer.model, every=2)
    trainer.add_callback(MonitorCallback(monitor, log=trainer.log))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    name = "attention/layer01/head01/entropy"
    entropies = [float(check.layers[1].heads.entropy[1]) for check in monitor.history]
    logged = [(row["step"], row[name]) for row in trainer.state.log_history if name in row]
    assert logged == list(zip([1, 3, 5], entropies, strict=True))
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 3, 4, 5]
    points = EventAccumulator(str(tmp_path / "runs")).Reload().Scalars(f"train/{name}")
    assert [point.step for point in points] == [1, 3, 5]
    assert [point.value for point in points] == pytest.approx(entropies, rel=1e-6)
    with pytest.raises(TypeError, match=r"MonitorCallback.log: expected a function such as trainer.log, got True"):
        MonitorCallback(monitor, log=True)


def test_the_log_of_a_trainer_is_a_writer_too(tmp_path):
    trainer = tiny_trainer(tmp_path, report_to=[], logging_strategy="steps", logging_steps=1)
    from cumulant.training import MonitorCallback

    monitor = Monitor(trainer.model, every=5, writer=trainer.log)
    trainer.add_callback(MonitorCallback(monitor))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert sum("attention/layer00/head00/entropy" in row for row in trainer.state.log_history) == 1
    assert sum("loss" in row for row in trainer.state.log_history) == 5


def test_lightning_counts_optimizer_steps_and_its_loggers_get_the_scalars(tmp_path):
    lightning = pytest.importorskip("lightning", reason="install cumulant[lightning]")
    from lightning.pytorch.loggers import CSVLogger

    from cumulant.training import MonitorLightningCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = observed_encoder()

        def training_step(self, batch, index):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    module = Module()
    monitor = Monitor(module, every=2)
    logger = CSVLogger(str(tmp_path), name="run", version=0)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_steps=5,
        accelerator="cpu",
        accumulate_grad_batches=2,
        logger=logger,
        callbacks=[MonitorLightningCallback(monitor, log=True)],
        **quiet,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader([tokens()[0]] * 20, batch_size=2))
    assert [check.step for check in monitor.history] == [0, 2, 4]
    assert [check.layers[0].name for check in monitor.history] == ["model.layers.0.self_attn"] * 3
    polars = pytest.importorskip("polars", reason="install cumulant[report]")
    table = polars.read_csv(tmp_path / "run" / "version_0" / "metrics.csv").sort("step")
    entropies = [float(check.layers[1].heads.entropy[0]) for check in monitor.history]
    assert table["step"].to_list() == [0, 2, 4]
    assert table["attention/layer01/head00/entropy"].to_list() == pytest.approx(entropies, rel=1e-6)
    with pytest.raises(TypeError, match=r"MonitorLightningCallback.monitor: expected a Monitor, got int"):
        MonitorLightningCallback(3)


def test_a_missing_lightning_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "cumulant.observatory.monitor.lightning", raising=False)
    import cumulant.training

    with pytest.raises(ModuleNotFoundError, match=r"Lightning needs lightning: run pip install .*\[lightning\]"):
        cumulant.training.MonitorLightningCallback  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        cumulant.training.Nothing  # noqa: B018


def test_alarms_come_by_severity_each_on_one_line():
    detector = AlarmDetector(Thresholds(reach=1, collapsed=0.0))
    dead = torch.tensor([False, True])
    detector.alarms(0, [layer_check(name=name)._replace(dead=dead) for name in "abc"])
    grown = layer_check(name="a", expansion=100.0)
    fallen = layer_check(
        name="b",
        entropy=torch.tensor([0.01, 0.5], dtype=torch.float64),
        max_score=torch.tensor([0.5, 90.0], dtype=torch.float64),
    )
    broken = layer_check(name="c", entropy=torch.full((2,), math.nan, dtype=torch.float64))
    quiet = torch.tensor([False, False])
    alarms = detector.alarms(
        10, [grown._replace(dead=dead, collapsed=quiet), fallen._replace(dead=quiet, collapsed=quiet), broken]
    )
    assert [(a.kind, a.layer) for a in alarms] == list(zip(SEVERITY, (2, 1, 1, 0, 0), strict=True))
    assert not any("\n" in alarm.words for alarm in alarms)


def test_the_history_is_a_sequence():
    history = CheckHistory(keep=8)
    checks = [Check(step, (layer_check(),)) for step in range(5)]
    for check in checks:
        history.add(check)
    assert isinstance(history, Sequence)
    assert len(history) == 5
    assert history[0] is checks[0]
    assert history[-1] is checks[4]
    assert [check.step for check in history[1:4:2]] == [1, 3]
    assert [check.step for check in reversed(history)] == [4, 3, 2, 1, 0]
    assert checks[2] in history
    assert Check(2, (layer_check(),)) not in history
    with pytest.raises(IndexError):
        history[5]
    assert repr(history) == "CheckHistory(5 of 5 checks, steps 0 to 4)"
    assert repr(CheckHistory(3)) == "CheckHistory(0 of 0 checks)"


def test_the_history_as_a_frame(monkeypatch):
    pytest.importorskip("polars", reason="install cumulant[report]")
    monitor = Monitor(observed_encoder(), every=1)
    train(monitor, 2)
    rows, frame = monitor.rows(), monitor.history.frame()
    assert frame.to_dicts() == rows
    assert frame.height == 2 * 2 * 2
    pytest.importorskip("pandas", reason="install pandas")
    other = monitor.history.frame("pandas")
    assert other["entropy"].tolist() == [row["entropy"] for row in rows]
    with pytest.raises(ValueError, match=r"CheckHistory.frame.kind: expected .*, got 'arrow'"):
        monitor.history.frame("arrow")
    monkeypatch.setitem(sys.modules, "polars", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"polars: run pip install .*\[report\]"):
        monitor.history.frame()
    with pytest.raises(ModuleNotFoundError, match=r"pandas: run pip install pandas"):
        monitor.history.frame("pandas")


def test_attention_that_cannot_be_seen_is_refused_with_its_places():
    model = encoder(5)
    places = r"layers.0.self_attn, layers.1.self_attn, layers.2.self_attn and 2 more"
    with pytest.raises(ValueError, match=rf"Monitor.model: expected .* got torch.nn.MultiheadAttention at {places}\. "):
        Monitor(model)
    assert hooks_of(model) == 0
    before = model(tokens())
    swap(model, "layers.3.self_attn", MultiheadAttention.of(model.get_submodule("layers.3.self_attn")))
    monitor = Monitor(model, every=1)  # what can be seen is
    torch.testing.assert_close(model(tokens()), before)
    assert [layer.name for layer in monitor.step().layers] == ["layers.3.self_attn"]


def test_attention_of_ones_own_that_reports_nothing_is_named():
    class SilentAttention(nn.Linear):
        pass

    model = nn.Sequential(SilentAttention(8, 8), SilentAttention(8, 8))
    monitor = Monitor(model, every=1)
    model(tokens())
    words = r"gradients on.* Attention of your own, here 0, 1, has to call cumulant.nn.report_attention"
    with pytest.warns(MonitorWarning, match=words):
        assert monitor.step() is None


def test_a_transformers_model_that_cannot_be_seen_is_refused_with_its_places(monkeypatch):
    hf = pytest.importorskip("transformers", reason="install cumulant[hf]")
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=5, n_head=2))
    monkeypatch.setattr(model, "_can_set_attn_implementation", lambda: False)
    places = r"GPT2LMHeadModel with transformer.h.0.attn, transformer.h.1.attn, transformer.h.2.attn and 2 more"
    with pytest.raises(ValueError, match=rf"got {places}\. Its attention is written out"):
        Monitor(model)
