"""What each process does in test_ddp.py, under torchrun: `python -m tests.contrastive.ddp_checks OUT`.

Encoders in DistributedDataParallel, losses over its group, two steps of SGD; the oracle is one process with the whole
batch. Each rank writes the largest relative differences as JSON.
"""

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cumulant.contrastive import info_nce, linear_cross_entropy, nt_xent
from cumulant.kernels.sharded import deal

ROWS, WIDTH, DIM, WORDS, STEPS = 13, 6, 4, 10, 2


class Encoder(nn.Module):
    """Two layers and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, DIM))
        self.log_temperature = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.log_temperature.exp()


class Head(nn.Module):
    """An encoder and no temperature: everything that DDP holds is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


def steps(model: nn.Module, loss_of, *extra: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
    """Losses and gradients over two steps: DDP lays its buckets out anew after the first."""
    parameters = [*model.parameters(), *extra]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    out = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        out.append((loss.detach(), [p.grad.clone() for p in parameters if p.grad is not None]))
        optimizer.step()
    return out


def worst(found, expected) -> dict[str, float]:
    values = max(gap(f[0], e[0]) for f, e in zip(found, expected, strict=True))
    slopes = max(gap(a, b) for f, e in zip(found, expected, strict=True) for a, b in zip(f[1], e[1], strict=True))
    return {"loss": values, "gradient": slopes}


def contrast(name: str, options: dict, gradients: str) -> dict[str, float]:
    torch.manual_seed(0)
    encoder = Encoder().double()
    parallel = DistributedDataParallel(copy.deepcopy(encoder))

    def loss(model: nn.Module, step: int, whole: bool) -> Tensor:
        first, second = (draw(ROWS, WIDTH, seed=10 * step + k) for k in (0, 1))
        table = {k: v if whole else deal(v, dim=0) for k, v in options.items() if isinstance(v, Tensor)}
        if not whole:
            first, second = deal(first), deal(second)
        both, temperature = model(torch.cat([first, second]))
        group = {} if whole else {"group": dist.group.WORLD, "gradients": gradients}
        function = nt_xent if name == "nt_xent" else info_nce
        return function(*both.chunk(2), temperature=temperature, **{**options, **table}, **group)

    found = steps(parallel, lambda model, step: loss(model, step, False))
    return worst(found, steps(encoder, lambda model, step: loss(model, step, True)))


def vocabulary() -> dict[str, float]:
    """Hidden states replicated and in DDP, words sharded and out of it."""
    torch.manual_seed(0)
    encoder = Head().double()
    parallel = DistributedDataParallel(copy.deepcopy(encoder))
    weight, bias = draw(WORDS, DIM, seed=3), draw(WORDS, seed=4)
    targets = torch.arange(ROWS) % WORDS
    targets[2] = -100

    def loss(model: nn.Module, step: int, words: list[Tensor], group) -> Tensor:
        hidden = model(draw(ROWS, WIDTH, seed=step))
        loss = linear_cross_entropy(hidden, words[0], targets, bias=words[1], z_loss=0.01, group=group)
        assert isinstance(loss, Tensor)
        return loss

    mine = [deal(weight).clone().requires_grad_(), deal(bias, dim=0).clone().requires_grad_()]
    whole = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    found = steps(parallel, lambda m, s: loss(m, s, mine, dist.group.WORLD), *mine)
    expected = steps(encoder, lambda m, s: loss(m, s, whole, None), *whole)
    for _, slopes in expected:
        slopes[-2:] = [deal(slopes[-2]), deal(slopes[-1], dim=0)]
    return worst(found, expected)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    table = draw(ROWS, ROWS, seed=5) > 0.5
    table[3] = False
    cases = {"own": {}, "symmetric": {"symmetric": True}, "table": {"positives": table}, "sum": {"reduction": "sum"}}
    found = {name: contrast("info_nce", options, "mean") for name, options in cases.items()}
    found["nt_xent"] = contrast("nt_xent", {}, "mean")
    found["added up"] = contrast("info_nce", {}, "sum")
    found["vocabulary"] = vocabulary()
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # threads of gloo in torch 2.13 that outlive the group abort the interpreter's end, in 2 runs of 12
