"""torch's attention kernels beside the reference: the one of CUDA by its contract, and the check before it serves."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cumulant import moments
from cumulant.kernels import fused, operator
from cumulant.kernels.attention_check import check, why_wrong
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.support import Band
from cumulant.kernels.torch_attention import CpuFlash, CudaEfficient, Operands, kernel_of, spaced_rows
from tests.compare import close
from tests.kernels import cuda_attention

CPU = torch.device("cpu")


@pytest.fixture
def as_on_cuda(monkeypatch):
    """CPU tensors take the way of CUDA tensors, to operators that keep the contract of CUDA's."""
    monkeypatch.setattr(fused, "kernel_of", lambda device: CudaEfficient())
    with cuda_attention.on_cpu():
        yield


def normal(seed: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=seed)


SUPPORTS = ("plain", "causal", "mask", "padding")


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("width", [None, 6, 9], ids=["values=atoms", "narrower", "wider"])
@pytest.mark.parametrize("wanted", [("mean", "entropy"), ("mean",), ("mean_score",)], ids=" ".join)
def test_the_way_of_cuda_tensors_is_the_reference(as_on_cuda, support, width, wanted):
    seed = torch.Generator().manual_seed(0)
    q = n = 45
    eta, atoms = normal(seed, 2, 3, q, 7), normal(seed, 2, 3, n, 7)
    values = None if width is None else normal(seed, 2, 3, n, width)
    options = {"causal": support == "causal"}
    if support == "mask":
        options["mask"] = torch.rand(2, 3, q, n, generator=seed) > 0.5
        options["mask"][..., 4, :] = False
    elif support == "padding":
        options["mask"] = torch.arange(n) < torch.tensor([30, 45])[:, None, None, None]

    def answers(backend: str):
        inputs = [t.clone().requires_grad_() for t in (eta, atoms, values) if t is not None]
        m = moments(*inputs, backend=backend, statistics=wanted, **options)
        held = {"G": m.log_normalizer, **{name: getattr(m, name) for name in wanted}}
        finite = [torch.where(t.isfinite(), t, 0) for t in held.values()]
        total = sum((t * t.detach().cos()).sum() for t in finite)
        return held, torch.autograd.grad(total, inputs, materialize_grads=True)

    found, slopes = answers("fused")
    right, right_slopes = answers("dense")
    for name in right:
        close(found[name], right[name], 1e-5)
    for slope, right_slope in zip(slopes, right_slopes, strict=True):
        close(slope, right_slope, 3e-5)


def test_cuda_tensors_need_one_call_for_the_mean_and_the_entropy(as_on_cuda, monkeypatch):
    calls = []
    one = CudaEfficient.forward
    monkeypatch.setattr(CudaEfficient, "forward", lambda self, x: calls.append(x.points.shape) or one(self, x))
    q, k, v = torch.randn(3, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    moments(q, k, v, backend="fused", statistics=("mean", "entropy"))
    assert calls == [(2, 20, 16)]  # [v ; k]


@pytest.mark.parametrize("biased", [False, True])
def test_the_shapes_are_those_of_torch_on_cuda(biased):
    """torch's own shape functions, which also serve torch.compile, take what we pass."""
    eta, atoms, points = (torch.empty(3, rows, width, device="meta") for rows, width in ((5, 7), (9, 7), (9, 6)))
    bias = torch.empty(1, 3, 5, 9, device="meta") if biased else None
    x = Operands(eta, atoms, points, bias, False)
    out, lse = CudaEfficient().forward(x)
    assert (out.shape, lse.shape) == ((3, 5, 6), (3, 5))
    assert lse.dtype == torch.float32
    slopes = CudaEfficient().backward(x, out, out, lse)
    assert [s.shape for s in slopes] == [eta.shape, atoms.shape, points.shape]


def test_a_bias_that_is_expanded_stays_so_and_has_aligned_rows():
    row = torch.zeros(1, 1, 1, 9, device="meta").expand(1, 3, 5, 9)
    spaced = spaced_rows(row)
    assert spaced is not None
    assert spaced.shape == row.shape
    assert spaced.untyped_storage().nbytes() == 4 * 16
    full = spaced_rows(torch.zeros(1, 3, 5, 9))
    assert full is not None
    assert full.stride()[1:] == (80, 16, 1)


# ---------------------------------------------------------------------- the check before a kernel serves


@pytest.mark.parametrize("width", [1, 8, 64, 80, 256])
def test_the_check_passes_what_is_right(width):
    assert check(CpuFlash(), CPU, width, width) == ""
    with cuda_attention.on_cpu():
        assert check(CudaEfficient(), CPU, width, width + 3) == ""


class BaseTwo(CpuFlash):
    def forward(self, x):
        mean, lse = super().forward(x)
        return mean, lse / math.log(2)


class TimesLn2(CpuFlash):
    def forward(self, x):
        mean, lse = super().forward(x)
        return mean, lse * math.log(2)


class Padded(CpuFlash):
    def forward(self, x):
        mean, lse = super().forward(x)
        return mean, torch.nn.functional.pad(lse, (0, 27), value=torch.inf)


class Rounded(CpuFlash):
    """Scores from operands with ten bits, as in TF32."""

    def forward(self, x):
        eta, atoms = ((t * 4097) - (t * 4097 - t) for t in x[:2])
        return super().forward(x._replace(eta=eta, atoms=atoms))


class WithoutNormalizer(CpuFlash):
    """A backward pass that does not read the output it is given: the gradient of G would be lost."""

    def backward(self, x, row, out, lse):
        return super().backward(x, row, self.forward(x)[0] * 0, lse)


class NotANumber(CpuFlash):
    def forward(self, x):
        mean, lse = super().forward(x)
        return mean, torch.where(torch.arange(lse.shape[-1]) == 3, torch.nan, lse)


class Fails(CpuFlash):
    def backward(self, x, row, out, lse):
        raise RuntimeError("cutlassB: no kernel found to launch!\nmore")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (BaseTwo, "its log-sum-exp is in base 2"),
        (TimesLn2, "its log-sum-exp is times ln 2"),
        (Padded, "it failed (The size of tensor a (37) must match the size of tensor b (64)"),
        (Rounded, "its mean differs by"),
        (WithoutNormalizer, "its gradient of the queries differs"),
        (NotANumber, "its log-sum-exp differs by nan"),
        (Fails, "it failed (cutlassB: no kernel found to launch!)"),
    ],
)
def test_the_check_says_what_is_wrong(kind, words):
    found = check(kind(), CPU, 16, 16)
    assert words in found
    assert found.startswith("torch's flash attention on the CPU is not used: ")
    assert "\n" not in found


def test_a_kernel_without_the_padding_of_its_log_sum_exp_is_found_out(monkeypatch):
    """What `CudaEfficient` cuts off and puts back; without it the operators of CUDA refuse or return more rows."""
    monkeypatch.setattr("cumulant.kernels.torch_attention.LSE_ROW", 1)
    with cuda_attention.on_cpu():
        assert "padded to a multiple of 32" in check(CudaEfficient(), CPU, 8, 8)


def test_the_check_runs_once_for_a_device_and_widths(monkeypatch):
    class Own(CpuFlash):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return super().forward(x)

    first = [why_wrong(Own(), CPU, 8, 8), Own.calls]
    assert first == ["", 3]
    why_wrong(Own(), CPU, 8, 8)
    assert Own.calls == 3
    why_wrong(Own(), CPU, 8, 12)
    assert Own.calls > 3


def test_the_check_serves_under_transforms_and_modes():
    class Mapped(CpuFlash):
        pass

    class Faked(CpuFlash):
        pass

    def sized(x):
        assert why_wrong(Mapped(), CPU, 8, 8) == ""
        return x.sum()

    torch.func.vmap(torch.func.grad(sized))(torch.ones(2, 3))
    with FakeTensorMode():
        assert why_wrong(Faked(), CPU, 8, 8) == ""


def choose(backend: str, x: Inputs, plan: Plan) -> str:
    return operator._choose(backend, x, plan, "moments")  # pyright: ignore[reportPrivateUsage]


def test_tensors_of_a_wrong_kernel_take_streaming(monkeypatch):
    """As on a CUDA device whose kernel is wrong; the device is a fake, the choice is the real one."""
    monkeypatch.setattr(operator, "recorded", lambda: False)
    with FakeTensorMode(), torch.no_grad():
        eta = torch.empty(4, 300, 16, device="cuda")
        x, plan = Inputs.of((eta, eta, None, None, None)), Plan(frozenset({"log_normalizer", "atom_mean"}), Band())
        why = fused.refusal(x, plan)
        assert why is not None
        assert why.startswith("torch's memory-efficient attention on CUDA is not used: it failed (")
        assert choose("auto", x, plan) == "streaming"
        with pytest.raises(
            ValueError, match=r"^moments.backend: expected a request that 'fused' can serve, got torch's"
        ):
            choose("fused", x, plan)
        monkeypatch.setattr(fused, "why_wrong", lambda *arguments: "")
        assert choose("auto", x, plan) == "fused"


@pytest.mark.parametrize(
    ("dtype", "size", "words"),
    [
        (torch.float64, (2, 300, 16), r"it is used in float32 on cuda, not torch.float64"),
        (torch.float32, (70000, 1, 16), r"it takes at most 65535 groups of queries on cuda, not 70000"),
    ],
)
def test_what_the_kernel_of_cuda_cannot_take_is_said(dtype, size, words):
    with FakeTensorMode(), torch.no_grad():
        eta = torch.empty(size, device="cuda", dtype=dtype)
        plan = Plan(frozenset({"log_normalizer"}), Band())
        assert fused.refusal(Inputs.of((eta, eta, None, None, None)), plan) == words


def test_devices_without_a_kernel_are_named():
    eta = torch.empty(2, 300, 16, device="meta")
    plan = Plan(frozenset({"log_normalizer"}), Band())
    said = fused.refusal(Inputs.of((eta, eta, None, None, None)), plan)
    assert said == "it runs on the CPU and on CUDA, not on meta"
    assert isinstance(kernel_of(CPU), CpuFlash)
    assert isinstance(kernel_of(torch.device("cuda", 1)), CudaEfficient)
