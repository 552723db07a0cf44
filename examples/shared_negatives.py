"""Contrastive learning in which every rank sees the negatives of all, with the loss and gradient of one process.

    torchrun --nproc-per-node 2 examples/shared_negatives.py

Two views of scikit-learn's digits, one linear encoder in DistributedDataParallel. `info_nce(..., group=...)` is the
loss of the whole batch on every rank. Gradients of the encoder are partial, as each rank used its own rows, and DDP
averages them: `gradients="mean"` makes that average the gradient of one process. Where you add gradients up yourself,
as with `dist.all_reduce(encoder.weight.grad)`, leave it at "sum".
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from cumulant.contrastive import info_nce

STEPS, BATCH, WIDTH = 60, 512, 16


def views(images: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two noisy copies of each image, with some of its pixels set to zero."""
    noise = 0.3 * torch.randn(2, *images.shape, generator=generator, dtype=images.dtype)
    kept = torch.rand(2, *images.shape, generator=generator) < 0.7
    first, second = (images + noise) * kept
    return first, second


def train(group, rank: int, ranks: int) -> list[float]:
    """Losses over training on a part of every batch; ``ranks`` = 1 is one process with the whole batch."""
    images = torch.tensor(load_digits().data) / 16
    torch.manual_seed(0)
    encoder = torch.nn.Linear(images.shape[1], WIDTH, bias=False, dtype=torch.float64)
    model = encoder if group is None else DistributedDataParallel(encoder, process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        batch = images[torch.randperm(len(images), generator=generator)[:BATCH]]
        first, second = (view.chunk(ranks)[rank] for view in views(batch, generator))
        query, key = normalize(model(torch.cat([first, second])), dim=-1).chunk(2)  # DDP: one forward pass a step
        loss = info_nce(query, key, temperature=0.1, symmetric=True, group=group, gradients="mean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shared = train(dist.group.WORLD, rank, ranks)
    if rank == 0:
        alone = train(None, 0, 1)
        gap = max(abs(a - b) for a, b in zip(shared, alone, strict=True))
        print(f"{ranks} ranks, {BATCH // ranks} pairs on each, {BATCH - 1} negatives for everyone")
        print(f"loss {shared[0]:.4f} → {shared[-1]:.4f} in {STEPS} steps; one process differs by at most {gap:.1e}")
        assert shared[-1] < shared[0]
        assert gap < 1e-9
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
