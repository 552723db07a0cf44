"""What observing holds in memory: nothing that grows with the number of texts, and never queries times keys."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from Linux's /proc"),
]

PEAK = """
import re, torch
from transformers import LlamaConfig, LlamaModel
from cumulant.observatory import attach
torch.set_num_threads(1)
torch.manual_seed(0)
def peak():  # not ru_maxrss, which a child inherits from its parent
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024
config = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=4096)
model = LlamaModel(config).eval().requires_grad_(False)
def read(count, length):
    ids = torch.randint(64, (count, length))
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
"""
MANY = """
with attach(model) as recorder:
    for _ in range(40):  # past the second perturbation
        read(4, 100)
    before = peak()
    for _ in range(80):
        read(4, 100)
    print(peak() - before)
assert recorder.record().tally("entropy").count.tolist() == [120 * 400] * 8
"""
LONG = """
with attach(model) as recorder:
    read(1, 128)
read(1, 4096)  # what the model itself needs
before = peak()
with attach(model) as recorder:
    read(1, 4096)
print(peak() - before)
assert recorder.record().tally("entropy").count.tolist() == [4096] * 8
assert recorder.record().hidden
"""


def grown(code: str) -> float:
    """MiB by which the peak of a fresh process rises where the code says so."""
    # freed blocks go back, so that the peak is what is held
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", PEAK + code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return float(run.stdout)


def test_three_times_the_texts_take_no_more_memory():
    assert grown(MANY) < 4


def test_a_long_text_is_never_length_times_length():
    """Of one head, 4096 × 4096 float32 would be 64 MiB; all quantities of all heads take less beyond the model."""
    assert grown(LONG) < 64
