"""Speed-up and communication of several processes, compared with the cost model of docs/scale.md.

    torchrun --nproc-per-node 2 examples/scaling.py [N]

One thread per rank. Times alternate in one run: rank 0 alone with all atoms while the others wait, then all ranks with
their shares. Bytes are those that the kernel counted on the sockets of rank 0 (Linux). Ranks beyond the cores of a
machine share them: the ratio then says nothing about more machines.
"""

import functools
import os
import socket
import statistics
import struct
import sys
import time

import torch
import torch.distributed as dist

from cumulant import deal, moments, sharded_moments

WIDTH, ROUNDS = 64, 5


def sent() -> int:
    """Bytes this process sent over TCP, from the kernel's TCP_INFO of each of its sockets."""
    dist.barrier()
    time.sleep(0.2)  # what is still in a buffer goes out
    total = 0
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                first, again = struct.unpack_from("<QQ", info, 200)  # the second time does not count
                total += first - again
        except OSError:
            continue
    return total


def timed(call) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    eta, atoms = torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(0))
    eta = eta / WIDTH**0.5
    share, number = (ranks - 1) / ranks, 4
    modes = {
        "replicated queries": (eta, {}, 2 * share * number * n * (2 + WIDTH)),
        "ring": (deal(eta), {"queries": "sharded"}, (ranks - 1) * number * (n // ranks) * WIDTH),
    }
    if rank == 0:
        print(f"{n} queries and atoms of width {WIDTH}, float32, {ranks} ranks with one thread each")
    for name, (rows, options, model) in modes.items():
        ours = functools.partial(sharded_moments, rows, deal(atoms), statistics=("mean",), **options)
        ours()  # connections are made once
        before = sent()
        ours()
        bytes_ = sent() - before
        alone, together = [], []
        for _ in range(ROUNDS):
            alone.append(timed(lambda: moments(eta, atoms, statistics=("mean",)) if rank == 0 else None))
            together.append(timed(ours))
        if rank == 0:
            ratio = statistics.median(a / b for a, b in zip(alone, together, strict=True))
            traffic = f"{bytes_ / 1e6:.2f} MB sent, {bytes_ / model:.3f} of the model" if model else "nothing to send"
            print(f"  {name:18} {ratio:.2f} × the throughput of one; {traffic}")
            assert not model or not bytes_ or abs(bytes_ / model - 1) < 0.05
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
