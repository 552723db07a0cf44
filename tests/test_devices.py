"""What the package does on a device that is not the CPU, as far as it can be seen without one.

Calls run on meta tensors under `device_guard`: they wait for the device only at `READS`, make nothing on the CPU and
mix no devices. Tensors of different devices are refused in a sentence. Speed on a GPU is not measured anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cumulant
from cumulant import attend, attention, checks, fisher_product, moments, nn
from cumulant.contrastive import (
    alignment_uniformity,
    info_nce,
    linear_cross_entropy,
    nce_loss,
    nt_xent,
    sgns_loss,
    vmf_nll,
)
from cumulant.hopfield import energy, retrieve
from cumulant.kernels import attention_profile, fused, operator
from cumulant.kernels.fisher import FisherProduct
from cumulant.kernels.inputs import Plan
from cumulant.kernels.support import Band
from cumulant.kernels.torch_attention import CudaEfficient
from tests.device_guard import Waits, guard

READS = {  # file:function that reads a value → why it may
    # arguments that must be legal; a call has few of them
    "kernels/request.py:_check": "log weights below +inf: one look a call that has some",
    "kernels/operator.py:_sink": "a sink that is a tensor is below +inf; a number is looked at as a number",
    "contrastive/arguments.py:in_range": "labels within the vocabulary: out of range, CUDA would end the process",
    "contrastive/arguments.py:target_of": "no point is its own positive",
    "contrastive/pairs.py:vmf_nll": "points on the sphere",
    "measures/empirical.py:__post_init__": "a measure is made of finite atoms",
    "hopfield.py:_beta": "an inverse temperature that is a tensor is positive; a number is looked at as a number",
    "potentials.py:__post_init__": "a potential is made of finite weights",
    "nn/masks.py:_require_causal": "a mask beside is_causal=True is the causal one",
    "nn/masks.py:_visible_or_weight": "a floating mask of 0 and -inf is taken as a Boolean one",
    "nn/regularisers.py:entropy_floor": "a floor that is a tensor is not negative",
    # numbers that decide how the rest is computed
    "kernels/evaluate.py:_finite_products": "numbers near the edge of the dtype go to the reference: one look",
    "kernels/columns.py:of": "rows far from the centre of their keys go to the reference: one look if a trace is asked",
    "kernels/dense.py:without_nonfinite": "NaN and infinities shown or hidden: one look, small problems only",
    "transformers.py:_padding": "padding or none decides on the mask of all layers: one look a pass of the model",
    # loops that end when all samples are done
    "solve/driver.py:iterate": "fixed points: a look an iteration, else all of max_steps would run",
    "nn/energy.py:_backtrack": "line search: a look a halving",
    "nn/hopfield.py:_check_convergence": "states that are not at rest are warned of: one look a call",
    "solve/implicit.py:_warn_unsolved": "wrong gradients of fixed points are warned of: one look a backward pass",
    "nn/equilibrium.py:forward": "samples without a fixed point are warned of: one look a call",
    "nn/equilibrium.py:backward": "the same of the backward pass",
    # statistics that Python compares with thresholds; steps that are not observed have none
    "observatory/statistics/heads.py:head_statistics": "a look at finiteness and one transfer, each observed layer",
    "observatory/monitor/monitor.py:_layer": "the expansion of a block, at the end of a step that is observed",
}


def away(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, device="meta", dtype=dtype, requires_grad=dtype.is_floating_point)


def flags(*size: int) -> Tensor:
    return away(*size, dtype=torch.bool)


def integers(*size: int) -> Tensor:
    return away(*size, dtype=torch.int64)


def pull(*outputs: Tensor) -> None:
    """The backward pass of everything that has one."""
    total = [t.sum() for t in outputs if t.is_floating_point() and t.requires_grad]
    torch.stack(total).sum().backward()


# ---------------------------------------------------------------------- what may wait, and where


SUPPORTS: dict[str, Callable[[], dict]] = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "window": lambda: {"window": 5, "offset": 0},
    "padding": lambda: {"mask": flags(2, 1, 1, 90)},
    "mask": lambda: {"mask": flags(2, 4, 90, 90)},
    "weights of keys": lambda: {"log_weights": away(2, 4, 90)},
    "weights of pairs": lambda: {"log_weights": away(2, 4, 90, 90)},
    "sink": lambda: {"sink": 0.5},
    "sinks": lambda: {"sink": away(4)},
}


def every_statistic(engine: str, support: str) -> Callable[[], object]:
    def run() -> None:
        q, k, v = away(2, 4, 90, 16), away(2, 4, 90, 16), away(2, 4, 90, 8)
        options = SUPPORTS[support]()
        wanted = ("mean", "mean_score") if engine == "fused" else "all"
        m = moments(q, k, v, statistics=wanted, backend=engine, **options)
        assert m.mean is not None
        assert (m.mean.shape, m.log_normalizer.shape) == ((2, 4, 90, 8), (2, 4, 90))
        pull(m.log_normalizer, *m.statistics.values())

    return run


def layer(make: Callable[[], torch.nn.Module], *size: int) -> Callable[[], object]:
    with torch.device("meta"):
        module = make()
    return lambda: pull(module(away(*(size or (2, 12, 16)))))


def heads(**masks: Callable[[], Tensor] | bool) -> Callable[[], object]:
    def run() -> None:
        module = nn.MultiheadAttention(16, 4, batch_first=True, device="meta")
        x = away(2, 12, 16)
        given = {name: value() if callable(value) else value for name, value in masks.items()}
        pull(module(x, x, x, need_weights=False, **given)[0])
        pull(module.attend(x, x, x, **given).output)

    return run


def attended() -> None:
    a = attend(away(2, 4, 90, 16), away(2, 2, 90, 16), away(2, 2, 90, 8), causal=True, sink=1.0, source_marginal=True)
    assert a.source_marginal is not None
    pull(*a)


def fisher() -> None:
    plan = Plan(frozenset({"log_normalizer"}), Band(True, None, 0, 90), "streaming")
    pull(FisherProduct.apply(away(2, 90, 16), away(2, 90, 16), None, None, None, away(2, 90, 16), plan))


def profile() -> None:
    with torch.no_grad():
        q, k, v = (away(2, 4, 90, 16).detach() for _ in range(3))
        assert attention_profile(q, k, v, causal=True, distance_edges=(0, 1, 8)).moments.log_normalizer.is_meta


def model(kind: str, how: str) -> Callable[[], object]:
    def run() -> None:
        import transformers

        import cumulant.transformers as on_transformers
        from cumulant.training import Monitor

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
        options = {"vocab_size": 50, "attn_implementation": "cumulant", **sizes}
        with torch.device("meta"):
            if kind == "encoder":
                network = transformers.BertModel(transformers.BertConfig(attention_probs_dropout_prob=0.0, **options))
            else:
                network = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **options))
        ids = integers(2, 12)
        if how == "alone":
            pull(network(input_ids=ids)[0])
        elif how == "observed":
            with on_transformers.on_attention(network, lambda call: call.moments.entropy.sum(), "score_variance"):
                pull(network(input_ids=ids)[0])
        elif how == "padded":
            pull(network(input_ids=ids, attention_mask=integers(2, 12))[0])
        else:
            with Monitor(network, every=2) as monitor:
                pull(network(input_ids=ids)[0])
                monitor.step()
                before = set(used_here)
                pull(network(input_ids=ids)[0])  # a step that is not observed
                monitor.step()
                assert used_here == before

    return run


used_here: set[str] = set()

CALLS: dict[str, Callable[[], object]] = {
    **{f"moments, streaming, {support}": every_statistic("streaming", support) for support in SUPPORTS},
    **{f"moments, dense, {support}": every_statistic("dense", support) for support in SUPPORTS},
    **{f"moments, fused, {name}": every_statistic("fused", name) for name in ("plain", "causal", "padding", "mask")},
    "attend": attended,
    "attention": lambda: pull(attention(away(2, 4, 90, 16), away(2, 4, 90, 16), away(2, 4, 90, 8), is_causal=True)),
    "fisher_product": lambda: pull(fisher_product(away(2, 90, 16), away(2, 90, 16), away(2, 90, 16), causal=True)),
    "fisher_product, streaming": fisher,
    "attention_profile": profile,
    "info_nce": lambda: pull(info_nce(away(300, 16), away(300, 16), temperature=0.1)),
    "info_nce, matrix": lambda: pull(info_nce(away(30, 16), away(30, 16), positives=flags(30, 30))),
    "nt_xent": lambda: pull(nt_xent(away(30, 16), away(30, 16))),
    "linear_cross_entropy": lambda: pull(linear_cross_entropy(away(30, 16), away(99, 16), integers(30))),
    "nce_loss": lambda: pull(nce_loss(away(30), away(30, 5), away(30), away(30, 5))),
    "sgns_loss": lambda: pull(sgns_loss(away(30, 4), away(30, 4), away(30, 5, 4))),
    "vmf_nll": lambda: pull(vmf_nll(away(30, 4), away(30, 4))),
    "alignment_uniformity": lambda: alignment_uniformity(away(30, 4), away(30, 4)),
    "entropy_floor": lambda: pull(nn.entropy_floor(away(2, 4, 9), 1.0)),
    "entropy_floor of a tensor": lambda: pull(nn.entropy_floor(away(2, 4, 9), away(9))),
    "z_loss": lambda: pull(nn.z_loss(away(2, 4, 9), rows=flags(2, 1, 9))),
    "retrieve": lambda: retrieve(away(5, 16), away(30, 16), beta=2.0),
    "energy": lambda: energy(away(5, 16), away(30, 16), beta=2.0),
    "MultiheadAttention": heads(),
    "MultiheadAttention, causal": heads(is_causal=True),
    "MultiheadAttention, padding": heads(key_padding_mask=lambda: flags(2, 12)),
    "MultiheadAttention, causal mask": heads(attn_mask=lambda: flags(12, 12), is_causal=True),
    "MultiheadAttention, floating mask": heads(attn_mask=lambda: away(12, 12).detach()),
    "Hopfield": layer(lambda: nn.Hopfield(16)),
    "HopfieldLayer": layer(lambda: nn.HopfieldLayer(16, quantity=7)),
    "HopfieldPooling": layer(lambda: nn.HopfieldPooling(16)),
    "ConvexBlock": layer(lambda: nn.ConvexBlock(16, 2)),
    "EnergyBlock": layer(lambda: nn.EnergyBlock(16, 2)),
    "EquilibriumBlock": layer(lambda: nn.EquilibriumBlock(16, 2)),
    **{
        f"{kind}, {how}": model(kind, how) for kind in ("encoder", "decoder") for how in ("alone", "observed", "padded")
    },
    "encoder, monitored": model("encoder", "monitored"),
}


@pytest.fixture
def engines(monkeypatch):
    """The engine that is named serves meta tensors too, which `moments` gives to the reference; fused as on CUDA."""
    one = operator._choose  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        operator, "_choose", lambda backend, *rest: one(backend, *rest) if backend == "auto" else backend
    )
    monkeypatch.setattr(fused, "kernel_of", lambda device: CudaEfficient())


def test_calls_wait_for_the_device_only_where_it_is_said(engines):
    """And every place that may wait is one that does."""
    pytest.importorskip("transformers", reason="pip install cumulant[hf] to run: its models are among the calls")
    used_here.clear()
    faults = {}
    for name, call in CALLS.items():
        try:
            with guard(READS, used_here):
                call()
        except Waits as fault:
            faults[name] = str(fault)
    assert faults == {}
    assert used_here == READS.keys()


def test_the_guard_finds_what_it_is_to_find(monkeypatch):
    """Each kind of fault, put into a function of the package."""

    def fault(what: Callable[[Tensor], object]) -> str:
        source = "def run(what, x):\n    return what(x)\n"
        scope: dict = {}
        exec(compile(source, f"{cumulant.__path__[0]}/attention.py", "exec"), scope)
        with pytest.raises(Waits) as error, guard({}, set()):
            scope["run"](what, away(3))
        return str(error.value)

    waits = "attention.py:run waits for the device, in "
    reads = [bool, float, Tensor.item, Tensor.nonzero, Tensor.cpu, Tensor.unique]
    assert all(
        fault(lambda x, read=read: read(x.sum() if read in (bool, float, Tensor.item) else x)).startswith(waits)
        for read in reads
    )
    assert fault(Tensor.tolist).startswith(waits)
    assert fault(lambda x: x[x > 0]).startswith(waits)
    assert fault(lambda x: checks.somewhere(x > 0)).startswith(waits)
    assert "mixes devices" in fault(lambda x: torch.ones(3) + x) or "makes a tensor" in fault(
        lambda x: torch.ones(3) + x
    )
    assert "makes a tensor on the CPU" in fault(lambda x: torch.arange(3))
    assert "copies numbers to the device" in fault(lambda x: torch.tensor(2.0, device="meta"))
    cpu = torch.ones(3)
    assert "mixes devices" in fault(lambda x: x + cpu)


def test_values_are_not_read_while_a_cuda_graph_is_captured(monkeypatch):
    """Then a look would end the capture. The tensor is a fake one on CUDA, and a look at it would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        condition = torch.ones(2, dtype=torch.bool, device="cuda")
        looked = []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: looked.append(True) or True)
        assert checks.holds(condition)
        assert not checks.known(condition)
        assert len(looked) == 2


# ---------------------------------------------------------------------- tensors of different devices


def here(*size: int) -> Tensor:
    return torch.zeros(size)


MIXED = {
    "moments.atoms: expected device cpu as eta": lambda: moments(here(5, 4), away(6, 4)),
    "moments.values: expected device cpu as atoms": lambda: moments(here(5, 4), here(6, 4), away(6, 3)),
    "moments.mask: expected device cpu as eta": lambda: moments(here(5, 4), here(6, 4), mask=flags(5, 6)),
    "moments.log_weights: expected device cpu as atoms": lambda: moments(here(5, 4), here(6, 4), log_weights=away(6)),
    "moments.sink: expected device cpu as the queries": lambda: moments(here(2, 5, 4), here(2, 6, 4), sink=away(2)),
    "attend.key: expected device cpu as query": lambda: attend(here(5, 4), away(6, 4)),
    "attend.mask: expected device cpu as query": lambda: attend(here(5, 4), here(6, 4), mask=flags(6)),
    "attend.source_marginal: expected device cpu": lambda: attend(here(5, 4), here(6, 4), source_marginal=away(5)),
    "attention.attn_mask: expected device cpu": lambda: attention(here(5, 4), here(6, 4), here(6, 4), flags(5, 6)),
    "fisher_product.vector: expected device cpu": lambda: fisher_product(here(5, 4), here(6, 4), away(5, 4)),
    "attention_profile.marked: expected device cpu": lambda: attention_profile(
        here(5, 4), here(6, 4), here(6, 4), marked=flags(6)
    ),
    "info_nce.key: expected device cpu as query": lambda: info_nce(here(5, 4), away(5, 4)),
    "info_nce.positives: expected device cpu as query": lambda: info_nce(here(5, 4), here(5, 4), positives=integers(5)),
    "info_nce.temperature: expected device cpu as query": lambda: info_nce(here(5, 4), here(5, 4), temperature=away()),
    "linear_cross_entropy.targets: expected device cpu": lambda: linear_cross_entropy(
        here(5, 4), here(9, 4), integers(5)
    ),
    "nce_loss.data_log_noise: expected device cpu": lambda: nce_loss(here(5), here(5, 3), away(5), here(5, 3)),
    "sgns_loss.negatives: expected device cpu": lambda: sgns_loss(here(5, 4), here(5, 4), away(5, 3, 4)),
    "hopfield.state: expected device meta as patterns": lambda: retrieve(here(5, 4), away(6, 4)),
    "Empirical.mean: expected device cpu as the measure": lambda: cumulant.Empirical(here(6, 4)).mean(away(5, 4)),
    "entropy_floor.rows: expected device cpu": lambda: nn.entropy_floor(here(3), 1.0, rows=flags(3)),
    "MultiheadAttention.query: expected device cpu as the parameters": lambda: nn.MultiheadAttention(8, 2)(
        away(3, 8), away(3, 8), away(3, 8)
    ),
    "MultiheadAttention.attn_mask: expected device cpu as query": lambda: nn.MultiheadAttention(8, 2)(
        here(3, 8), here(3, 8), here(3, 8), attn_mask=flags(3, 3)
    ),
    "ConvexBlock.x: expected device cpu as the weights": lambda: nn.ConvexBlock(8, 2)(away(2, 3, 8)),
    "EnergyBlock.key_padding_mask: expected device cpu as x": lambda: nn.EnergyBlock(8, 2)(
        here(2, 3, 8), key_padding_mask=flags(2, 3)
    ),
}


@pytest.mark.parametrize("said", MIXED)
def test_tensors_of_two_devices_are_refused_in_a_sentence(said):
    """Which argument, what it is to be, and the call that moves it."""
    with pytest.raises(ValueError, match=rf"^{re.escape(said)}.*, got (meta|cpu)\. Call \.to\('(cpu|meta)'\) on it\.$"):
        MIXED[said]()


def test_moved_as_it_is_said_the_call_works():
    q, k = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    for tensor in (q, k):
        assert attend(q.to("meta"), tensor.to("meta")).output.shape == (5, 4)
    assert attend(q, k.to("cpu")).output.shape == (5, 4)
