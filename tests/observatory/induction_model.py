"""A model of two layers that is trained on sequences that repeat until it has previous-token and induction heads."""

from __future__ import annotations

from functools import cache

import torch

from cumulant.observatory.runs.repeated import repeated_tokens
from tests.observatory.tiny_models import hf

LENGTH, VOCABULARY = 20, 48


def untrained_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)).eval()


@cache
def trained_model() -> tuple[torch.nn.Module, float]:
    """The model in evaluation mode, and its last loss.

    Sequences of one length would do without: what was there one length before can be found by its place.
    """
    model = untrained_model().train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps, loss = 1200, torch.tensor(float("inf"))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    for step in range(steps):
        length = 8 + step % 17
        ids = repeated_tokens(VOCABULARY, length=length, sequences=32, seed=1000 + step)
        loss = model(ids, labels=torch.where(torch.arange(2 * length) < length, -100, ids)).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval().requires_grad_(False), float(loss.detach())
