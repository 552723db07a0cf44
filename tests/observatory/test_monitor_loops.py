"""A monitor that acts in real training loops: Trainer, Lightning, accelerate, DDP, and checkpoints that are resumed."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cumulant.training import (
    EntropyFloor,
    LearningRateBrake,
    Monitor,
    MonitorWarning,
    QKClip,
    Stop,
    ZLoss,
)
from tests.observatory import clip_checks, tiny_models
from tests.observatory.test_monitor_writers import observed_encoder, tokens
from tests.observatory.tiny_models import hf

pytestmark = pytest.mark.filterwarnings("ignore")
LOUD = 60  # factor of the queries of a model whose logits are too large


def llama(factor: float = LOUD) -> Any:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**tiny_models.GROUPED))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(factor)
    return model


def loud_encoder() -> Any:
    model: Any = observed_encoder()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_weight[:8].mul_(LOUD)
    return model


def trainer(model: Any, tmp_path: Path, kind: Any = None, **options: Any) -> Any:
    pytest.importorskip("accelerate", reason="install accelerate: transformers' Trainer needs it")
    ids = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 2:] = -100  # passes of one step have different numbers of tokens
    data = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    fixed = {"per_device_train_batch_size": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    fixed |= {"save_strategy": "no", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "optim": "sgd"}
    arguments = hf.TrainingArguments(str(tmp_path), **fixed | options)
    return (kind or hf.Trainer)(model, arguments, train_dataset=data, eval_dataset=data)


class MeanTrainer(hf.Trainer):
    """A Trainer whose loss is a mean over one pass."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize("scaled", [True, False], ids=["part of the mean over the step", "mean over the pass"])
def test_trainer_adds_the_mean_of_the_penalties_over_the_passes_of_a_step(scaled, tmp_path):
    from cumulant.training import MonitorCallback

    model, other, rate = llama(), llama(), 1e-3
    loop = trainer(
        model, tmp_path, None if scaled else MeanTrainer, max_steps=1, gradient_accumulation_steps=2, learning_rate=rate
    )
    loop.add_callback(MonitorCallback(Monitor(model, reactions=[ZLoss(0.1)]), trainer=loop))
    loop.train()
    assert "compute_loss" not in loop.__dict__
    batches = list(loop.get_train_dataloader())
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    with Monitor(other, every=10**6, reactions=[ZLoss(0.1)]) as monitor:
        for batch in batches:
            out = other(**batch)
            mine = int((batch["labels"][:, 1:] != -100).sum())
            share = mine / count if scaled else 0.5
            (share * out.loss + monitor.penalty() / 2).backward()
    with torch.no_grad():
        for p in other.parameters():
            p -= rate * p.grad
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=name)


def test_trainer_needs_to_be_known_for_penalties_and_evaluation_has_none(tmp_path):
    from cumulant.training import MonitorCallback

    model = llama(3000)
    loop = trainer(model, tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    plain = loop.evaluate()["eval_loss"]
    with pytest.raises(TypeError, match=r"MonitorCallback\.trainer: expected the Trainer, got int"):
        MonitorCallback(Monitor(model), trainer=3)
    loop.add_callback(MonitorCallback(Monitor(model, reactions=[ZLoss()])))
    with pytest.raises(ValueError, match=r"MonitorCallback\.trainer: expected the Trainer, for penalties, got None"):
        loop.train()
    loop.callback_handler.callbacks.pop().monitor.close()
    loop = trainer(model, tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, learning_rate=0.0)
    monitor = Monitor(model, every=1, reactions=[ZLoss(1.0), EntropyFloor()], clip=QKClip(1e9))
    loop.add_callback(MonitorCallback(monitor, trainer=loop))
    loop.train()
    evaluated = [row["eval_loss"] for row in loop.state.log_history if "eval_loss" in row]
    assert evaluated == pytest.approx([plain] * 2, rel=1e-5)
    assert loop.state.log_history[-1]["train_loss"] > plain + 1
    assert {a.kind for a in monitor.actions} >= {"z-loss", "entropy floor"}


def test_a_checkpoint_of_trainer_goes_on_with_the_monitor_and_names_other_settings(tmp_path):
    from cumulant.training import MonitorCallback

    def run(monitor: Monitor, model: Any, steps: int, **resume: Any) -> Any:
        loop = trainer(model, tmp_path, max_steps=steps, save_strategy="steps", save_steps=2, learning_rate=0.5)
        loop.add_callback(MonitorCallback(monitor, trainer=loop))
        loop.train(**resume)
        return loop

    def reactions() -> list:
        return [LearningRateBrake(0.5), Stop(checks=50), EntropyFloor(0.2)]

    model = llama(3000)
    first = Monitor(model, every=2, clip=QKClip(2.0), reactions=reactions())
    loop = run(first, model, 2)
    state = first.state_dict()
    brake, stop, floor = (saved["state"] for saved in state["reactions"])
    assert brake["part"] == 0.5
    assert stop["seen"] == 1
    assert floor["active"]
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.25)
    model = llama(3000)
    second: Any = Monitor(model, every=2, clip=QKClip(3.0), reactions=reactions())
    words = r"Monitor\.load_state_dict: expected the settings of the checkpoint, QKClip\.threshold = 2\.0, got 3\.0\."
    with pytest.warns(MonitorWarning, match=words):
        loop = run(second, model, 3, resume_from_checkpoint=True)
    assert [check.step for check in second.history] == [2]
    assert second.reactions[0].part <= 0.5
    assert second.reactions[1].seen >= 1
    assert set(floor["active"][0]) <= {x for pair in second.reactions[2].active for x in pair}
    assert loop.optimizer.param_groups[0]["lr"] <= 0.25


SCHEDULES = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    "in turn": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 5), torch.optim.lr_scheduler.CosineAnnealingLR(o, 15)],
        milestones=[5],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_brake_holds_under_a_schedule(name):
    rates = []
    for brake in (False, True):
        torch.manual_seed(0)
        model = loud_encoder()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = SCHEDULES[name](optimizer)
        with Monitor(model, every=1000, reactions=[LearningRateBrake(0.5)] if brake else []) as monitor:
            rates.append([])
            for _ in range(10):
                model(tokens()).sum().backward()
                schedule.step()
                monitor.step(optimizer=optimizer, scheduler=schedule)
                rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[1] == pytest.approx([rate / 2 for rate in rates[0]])


def lightning_module(monitored: bool = True, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning", reason="install cumulant[lightning]")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = loud_encoder()
            self.monitor: Any = None

        def training_step(self, batch, index):
            loss = self.model(batch).square().mean()
            return loss + self.monitor.penalty()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0)}

    module = Module()
    object.__setattr__(module, "monitor", Monitor(module, **options))
    return module


def fit(module: Any, tmp_path: Path, steps: int, checkpoint: str | None = None) -> Any:
    import lightning

    from cumulant.training import MonitorLightningCallback

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    loop = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        accumulate_grad_batches=2,
        callbacks=[MonitorLightningCallback(module.monitor)],
        default_root_dir=str(tmp_path),
        **quiet,
    )
    loop.fit(module, torch.utils.data.DataLoader([tokens()[0]] * 40, batch_size=2), ckpt_path=checkpoint)
    return loop


def test_lightning_clips_with_momentum_brakes_adds_penalties_and_resumes(tmp_path):
    options = {"every": 2, "clip": QKClip(1.0, momentum="scale")}
    module = lightning_module(**options, reactions=[LearningRateBrake(0.5), ZLoss(1e-3), EntropyFloor()])
    loop = fit(module, tmp_path, 4)
    actions = module.monitor.actions
    first = [a for a in actions if a.step == 1 and a.kind == "clip"]
    assert max(a.before for a in first) > 1.2
    assert max((a.before for a in actions if a.step > 2 and a.kind == "clip"), default=0) < 1.2
    assert {"z-loss", "entropy floor", "learning rate"} <= {a.kind for a in actions}
    assert loop.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5e-3)
    loop.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    options["every"] = 3
    other = lightning_module(**options, reactions=[LearningRateBrake(0.5), ZLoss(1e-3), EntropyFloor()])
    with pytest.warns(MonitorWarning, match=r"the settings of the checkpoint, Monitor\.every = 2, got 3\."):
        fit(other, tmp_path, 6, checkpoint=str(tmp_path / "last.ckpt"))
    assert other.monitor.now == 6
    assert other.monitor.reactions[0].part <= 0.5
    assert not any(a.kind == "z-loss" for a in other.monitor.actions)  # said once, before


def test_lightning_stops_where_a_reaction_says_so(tmp_path):
    module = lightning_module(every=1, reactions=[Stop(("entropy",))])
    assert fit(module, tmp_path, 8).global_step == 1
    assert module.monitor.actions[-1].kind == "stop"


def test_accelerate_accumulates_clips_adds_penalties_and_resumes(tmp_path, caplog):
    accelerate = pytest.importorskip("accelerate", reason="install cumulant[hf]")
    accelerate.state.GradientState._reset_state()  # that of Trainers of other tests

    def prepared(threshold: float) -> tuple:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = loud_encoder()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        reactions = [ZLoss(1e-3), LearningRateBrake(0.5)]
        monitor = Monitor(model, every=2, clip=QKClip(threshold, momentum="scale"), reactions=reactions)
        accelerator.register_for_checkpointing(monitor)
        return accelerator, model, optimizer, schedule, monitor

    accelerator, model, optimizer, schedule, monitor = prepared(1.0)
    with caplog.at_level(logging.WARNING, "cumulant.monitor"), monitor:
        for _ in range(6):
            with accelerator.accumulate(model):
                loss = model(tokens()).square().mean() + monitor.penalty()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                monitor.step(optimizer=optimizer, scheduler=schedule)
        accelerator.save_state(str(tmp_path))
    assert [check.step for check in monitor.history] == [0, 2]
    assert max(a.before for a in monitor.actions if a.step == 1 and a.kind == "clip") > 1.2
    assert max((a.before for a in monitor.actions if a.step > 1 and a.kind == "clip"), default=0) < 1.2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-3)
    assert any("z-loss on" in line for line in caplog.messages)
    accelerator, *_, again = prepared(7.0)
    with pytest.warns(MonitorWarning, match=r"QKClip\.threshold = 1\.0, got 7\.0"):
        accelerator.load_state(str(tmp_path))
    assert again.now == 3
    assert again.reactions[1].part == 0.5
    again.close()


def test_states_that_are_none_are_refused_and_those_of_other_reactions_left_alone():
    monitor: Any = Monitor(observed_encoder(), reactions=[Stop(checks=3)])
    with pytest.raises(
        ValueError, match=r"Monitor\.load_state_dict\.state: expected what Monitor\.state_dict returned"
    ):
        monitor.load_state_dict({"step": 3})
    state = Monitor(observed_encoder(), reactions=[LearningRateBrake(part=0.25), Stop(checks=3, seen=2)]).state_dict()
    words = r"Monitor\.reactions = \['LearningRateBrake', 'Stop'\], got \['Stop'\]"
    with pytest.warns(MonitorWarning, match=words):
        monitor.load_state_dict(state)
    assert monitor.reactions[0].seen == 2


def test_ranks_of_ddp_have_the_mean_of_their_penalties(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.observatory.clip_checks", "penalty", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model, ids = clip_checks.model_and_batch()
    halves = []
    for part in ids.chunk(2):
        model.zero_grad()
        clip_checks.penalised_backward(model, part)
        halves.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, gradient in found.items():
            mean = (halves[0][name] + halves[1][name]) / 2
            torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6, msg=name)
