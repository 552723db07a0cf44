"""Causal attention over a sequence that no process holds whole.

    torchrun --nproc-per-node 2 examples/ring_attention.py

Each rank has a stretch of the tokens. Blocks of keys and values go round a ring, each rank merges what it meets, and
the gradient goes round once more. Rank 0 also does everything alone, to compare. Stripes are dealt in zigzag, so that
every rank has the same share of the causal triangle.
"""

import torch
import torch.distributed as dist

import cumulant
from cumulant import deal, sharded_moments

TOKENS, HEADS, WIDTH = 2048, 4, 32


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)  # the same on every rank, so that the result can be compared
    query, key, value = torch.randn(3, HEADS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)

    mine = [deal(t, layout="zigzag").requires_grad_() for t in (query, key, value)]
    found = sharded_moments(
        mine[0] / WIDTH**0.5,
        *mine[1:],
        queries="sharded",
        layout="zigzag",
        causal=True,
        statistics=("mean", "entropy"),
    )
    found.mean.square().sum().backward()  # every rank adds what its own tokens lose

    alone = [t.clone().requires_grad_() for t in (query, key, value)]
    whole = cumulant.attend(*alone, causal=True)
    whole.output.square().sum().backward()
    errors = [(deal(whole.output, layout="zigzag") - found.mean).abs().max()]
    errors += [(deal(a.grad, layout="zigzag") - m.grad).abs().max() for a, m in zip(alone, mine, strict=True)]
    worst = torch.stack([e.detach() for e in errors])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(
            f"{TOKENS} tokens on {ranks} ranks, {TOKENS // ranks} on each: the same as one process to {worst.max():.1e}"
        )
        for name, error in zip(("output", "d query", "d key", "d value"), worst.tolist(), strict=True):
            print(f"  {name:8} {error:.1e}")
        assert worst.max() < 1e-10
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
