"""What each process does in test_qk_clip.py, under torchrun: `python -m tests.observatory.clip_checks KIND OUT`.

One step at learning rate 0 of a model in DistributedDataParallel or FSDP2, each rank with sequences of its own; the
weights after the clip, which one process with all sequences must have too.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cumulant.training import EntropyFloor, LanguageConfig, LanguageModel, Monitor, QKClip, ZLoss

THRESHOLD, BATCH = 0.5, 4


def model_and_batch() -> tuple[LanguageModel, torch.Tensor]:
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(dim=16, heads=2, hidden=32, vocabulary=64, context=8))
    with torch.no_grad():
        for block in model.trunk.modules():
            if hasattr(block, "in_proj_weight"):
                block.in_proj_weight.mul_(3.0)
    return model, torch.randint(64, (BATCH, 8))


def one_step(model: torch.nn.Module, ids: torch.Tensor) -> list:
    optimizer = torch.optim.AdamW(model.parameters(), 0.0)
    with warnings.catch_warnings(), Monitor(model, clip=QKClip(THRESHOLD, momentum="scale")) as monitor:
        warnings.simplefilter("ignore")
        model(ids).square().mean().backward()
        optimizer.step()
        monitor.step(optimizer=optimizer)
    return list(monitor.actions)


def penalised_backward(model: torch.nn.Module, ids: torch.Tensor) -> None:
    with warnings.catch_warnings(), Monitor(model, reactions=[ZLoss(0.1), EntropyFloor(0.9, heads="all")]) as monitor:
        warnings.simplefilter("ignore")
        (model(ids).square().mean() + monitor.penalty()).backward()


def main(kind: str, out: Path) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, ids = model_and_batch()
    if kind == "penalty":
        penalised_backward(DistributedDataParallel(model), ids.chunk(size)[rank])
        torch.save({name: p.grad for name, p in model.named_parameters()}, out / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        return
    wrapped = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    actions = one_step(wrapped, ids.chunk(size)[rank])
    whole = {name: getattr(p, "full_tensor", p.clone)() for name, p in model.named_parameters()}
    state = {name: p.detach() for name, p in whole.items()}
    torch.save({"state": state, "actions": [(a.name, a.head, a.before) for a in actions]}, out / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    os._exit(0)  # threads of gloo in torch 2.13 that outlive the group abort the interpreter's end, in 2 runs of 12
