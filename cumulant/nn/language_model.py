"""A small language model whose blocks are chosen by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cumulant.checks import sentence, shape
from cumulant.contrastive import linear_cross_entropy
from cumulant.nn.stack import BlockStack, StackConfig

IGNORED = -100  # a target that is not counted


@dataclass(frozen=True)
class LanguageConfig(StackConfig):
    """A causal stack of blocks, the number of tokens in the vocabulary and the longest sequence."""

    dim: int = 128
    hidden: int = 512
    causal: bool = True
    vocabulary: int = 1024
    context: int = 128


class LanguageModel(nn.Module):
    """The next token from those before it: embeddings, learned positions, blocks, and the embeddings once more.

        p(y | x_1 … x_i) = exp(⟨h_i, w_y⟩ − G(h_i)),      h = R N(last block),      G(h) = log Σ_v exp⟨h, w_v⟩

    w_v embeds token v at the entrance and is its atom at the exit. Between the two stands a matrix R: a block that
    ascends a convex potential only turns towards what it is given, and without R would predict the token it has read.

    >>> import torch
    >>> model = LanguageModel(LanguageConfig(dim=16, heads=2, hidden=32, vocabulary=64, context=8))
    >>> ids = torch.zeros(2, 5, dtype=torch.long)
    >>> model(ids).shape, model.hidden(ids).shape
    (torch.Size([2, 5, 64]), torch.Size([2, 5, 16]))
    """

    def __init__(self, config: LanguageConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.position = nn.Parameter(torch.empty(config.context, config.dim))
        self.trunk = BlockStack(config)
        self.readout = nn.Linear(config.dim, config.dim, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)  # small as logits, and yet more than the positions
        nn.init.normal_(self.position, std=0.02)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """What the logits are linear in: (batch, n, dim).

        input_ids       (batch, n) integers, n ≤ context
        attention_mask  (batch, n) 1 where there is a token and 0 where there is padding; None: no padding
        """
        if input_ids.ndim != 2 or input_ids.shape[1] > self.config.context:
            expected = f"shape (batch, n ≤ {self.config.context})"
            raise ValueError(
                sentence("LanguageModel.input_ids", expected, shape(input_ids), "Cut the text into windows.")
            )
        x = self.embedding(input_ids) + self.position[: input_ids.shape[1]]
        return self.readout(self.trunk(x, None if attention_mask is None else attention_mask == 0))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits, (batch, n, vocabulary)."""
        return self.hidden(input_ids, attention_mask) @ self.embedding.weight.T

    def loss(self, input_ids: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
        """Nats per token, without holding the logits; targets (batch, n), `IGNORED` where none is asked for."""
        hidden = self.hidden(input_ids)
        loss = linear_cross_entropy(hidden, self.embedding.weight, targets, ignore_index=IGNORED, reduction=reduction)
        return loss if isinstance(loss, Tensor) else loss.loss
