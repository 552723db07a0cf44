"""examples/on_gpu.py where there is no GPU: what it refuses, what it calls wrong, and all of it on the CPU."""

import json
import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

testing = pytest.importorskip("typer.testing", reason="pip install cumulant[cli] to run")

from benchmarks import device_cases, measure, worker  # noqa: E402
from benchmarks.accuracy import problems  # noqa: E402
from benchmarks.device_accuracy import errors_of, faults, rows  # noqa: E402
from benchmarks.inputs import Attention  # noqa: E402
from cumulant import cli  # noqa: E402
from cumulant.checks import device_of  # noqa: E402

SCRIPT = Path(__file__).parent.parent / "examples" / "on_gpu.py"


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without CUDA")
def test_without_a_gpu_it_says_so_in_a_sentence(script, capsys):
    assert script["main"](["--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("--device: expected cpu or a CUDA device that torch sees, got cuda (torch")
    assert said.strip().endswith("With --device cpu the script runs here, to see what it does.")
    assert said.count("\n") == 1


def test_an_unknown_row_is_named_with_the_known_ones(script, capsys):
    with pytest.raises(SystemExit):
        script["main"](["fastest"])
    assert "no row is called 'fastest'; there are entropy, entropy-values" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["streaming", "fused", "auto"])
def test_paths_are_right_on_this_device(path):
    found = list(rows(path, "cpu", 33))
    assert {row["dtype"] for row in found} == {"float32", "bfloat16", "float16"}
    assert len({row["problem"] for row in found}) == 5
    assert faults(found) == []
    assert all("gradient of eta" in row["errors"] for row in found)


def test_what_is_wrong_is_called_wrong():
    row = next(iter(rows("streaming", "cpu", 33)))
    for size in (3e-3, float("nan")):
        worse = {**row, "errors": row["errors"] | {"entropy": size}}
        assert faults([worse]) == [f"streaming, ordinary, float32: entropy is off by {size:.1e}"]


def test_a_path_that_does_not_serve_says_why():
    """On a device without a kernel of torch's: the sentence of `moments` is the reason."""

    problem = next(problems(8))
    with pytest.raises(ValueError, match=r"moments.backend: expected one of"):
        errors_of(problem.rounded(torch.float32), problem, "triton of tomorrow", "cpu")


def test_rows_have_no_bounds_and_stand_beside_torch():
    cases = device_cases.catalogue(quick=True)
    assert tuple(cases) == device_cases.ROWS
    for case in cases.values():
        assert all(target.bound is None for target in case.targets)
        assert "SDPA" in {target.peer for target in case.targets}
    assert "FlexAttention with G" in cases["causal"].methods


def test_inputs_are_the_same_numbers_on_the_device():
    case = device_cases.catalogue(quick=True)["padding"]
    there = device_cases.placed(case, "meta").inputs()
    assert {t.device.type for t in there if isinstance(t, torch.Tensor)} == {"meta"}
    assert device_cases.placed(case, "cpu") is case
    assert isinstance(case.inputs, Attention)
    assert device_cases.placed(case, "meta").inputs.small()().eta.is_meta


def test_time_on_cuda_is_taken_between_events(monkeypatch):
    """The order of calls; events themselves need a device."""
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return 30.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("all done"))
    clock = worker.clock_of("cuda:0", 1)
    assert clock == measure.DeviceEvents(torch.device("cuda", 0))
    assert isinstance(clock, measure.DeviceEvents)
    assert clock.seconds(lambda: order.append("run"), 3) == pytest.approx(0.03)
    assert order == ["all done", "record", "run", "run", "run", "record", "wait"]
    assert worker.clock_of("cpu", 2) is not worker.clock_of("cpu", 1)


@pytest.mark.long
def test_all_of_it_on_the_cpu(script, tmp_path, capsys):
    out = tmp_path / "on_gpu.json"
    assert script["main"](["--device", "cpu", "--quick", "variance", "decode", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "torch's flash attention on the CPU: d=16 right" in said
    record = json.loads(out.read_text())
    assert [case["name"] for case in record["benchmarks"]["cases"]] == ["variance", "decode"]
    assert all(case["problem"] is None for case in record["benchmarks"]["cases"])
    assert {"auto", "fused", "streaming", "dense"} <= record["accuracy"].keys()
    ratios = [c["figure"] for case in record["benchmarks"]["cases"] for c in case["comparisons"] if c["peer"] == "SDPA"]
    assert all(figure["median"] > 0 for figure in ratios)


# ---------------------------------------------------------------------- --device of the commands


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu", r"got gpu (no name of a device). Use cpu, cuda or cuda:1."),
        ("meta", r"got meta (meta tensors hold no numbers). Use cpu."),
        ("cuda:99", "got cuda:99 (torch"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_a_sentence(name, words):
    with pytest.raises(ValueError, match=r"^--device: expected cpu or a CUDA device that torch sees, got ") as error:
        device_of("--device", name)
    assert words in str(error.value)


def test_devices_of_cuda_are_named_where_there_are_some(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"got cuda:2 \(torch sees cuda:0, cuda:1\)\. Name one of them, or use cpu\.$"):
        device_of("--device", "cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"got cuda \(torch sees no CUDA device\)\. See whether nvidia-smi lists one"):
        device_of("--device", "cuda")


@pytest.mark.parametrize(
    "words",
    [
        ("observe", "minilm", "--text", "text.txt"),
        ("audit", "smollm2", "--text", "text.txt"),
        ("compress", "smollm2", "--text", "text.txt"),
        ("generate", "smollm2", "--prompt", "a"),
        ("train", "recall"),
    ],
    ids=lambda words: words[0],
)
def test_commands_refuse_a_device_in_the_same_sentence(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a text " * 50)
    done = testing.CliRunner().invoke(cli.application(), [*words, "--device", "gpu"])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    expected = "--device: expected cpu or a CUDA device that torch sees, got gpu (no name of a device)."
    assert f"ValueError: {expected} Use cpu, cuda or cuda:1." in said
    assert not [path for path in tmp_path.iterdir() if path.name != "text.txt"]
