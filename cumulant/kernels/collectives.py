"""Collectives of torch.distributed with gradients: sums, maxima and a ring of point-to-point messages.

Convention: what every rank holds alike is *replicated*, and so is the loss. The gradient of something replicated is the
whole gradient on every rank; the gradient of a shard is the shard of the gradient. `spread` and `total` keep it so:
each is the transpose of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cumulant.checks import sentence

TIMEOUT = 300.0  # seconds to wait for the slowest rank
SIGNATURE_BYTES = 384  # of the text that must be equal on all ranks
Group = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True, eq=False)
class Ranks:
    """A process group, and how long to wait for its slowest member.

    group    a ProcessGroup, a DeviceMesh of one axis, or None for all processes
    timeout  seconds; a rank that does not answer in time is named in a TimeoutError on every other rank
    """

    group: Group = None
    timeout: float = TIMEOUT

    def __post_init__(self):
        if not dist.is_available() or not dist.is_initialized():
            advice = "Call torch.distributed.init_process_group('gloo'), and start the script with torchrun."
            raise RuntimeError(sentence("Ranks.group", "an initialized process group", "none", advice))
        if isinstance(self.group, DeviceMesh) and self.group.ndim != 1:
            got = f"{self.group.ndim} axes"
            raise ValueError(sentence("Ranks.group", "a DeviceMesh of one axis", got, "Pass mesh['name']."))
        if not (isinstance(self.timeout, int | float) and self.timeout > 0):
            raise ValueError(sentence("Ranks.timeout", "a positive number of seconds", self.timeout, "Try 300."))
        if self.rank < 0:
            raise ValueError(sentence("Ranks.group", "a group with this process in it", "another", "Pass its own."))

    @property
    def process_group(self) -> dist.ProcessGroup:
        if isinstance(self.group, DeviceMesh):
            return self.group.get_group()
        return dist.group.WORLD if self.group is None else self.group  # pyright: ignore[reportReturnType]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    # ------------------------------------------------------------------ with gradients

    def spread(self, x: Tensor) -> Tensor:
        """The identity, for a replicated tensor that meets a shard on each rank: its gradient is the sum over ranks."""
        return _Spread.apply(x, self)

    def total(self, x: Tensor) -> Tensor:
        """Σ over ranks, on every rank."""
        return _Total.apply(x, self)

    def averaged(self, x: Tensor) -> Tensor:
        """The same tensor; its gradient times the number of ranks, so that their average is the sum over ranks."""
        return _Averaged.apply(x, self)

    # ------------------------------------------------------------------ without

    def sum(self, x: Tensor) -> Tensor:
        """Σ over ranks, a constant."""
        return _Total.apply(x.detach(), self)

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over ranks, a constant."""
        return _Largest.apply(x.detach(), self)

    def reduced(self, x: Tensor, operation) -> Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1 and out.numel():
            with self.watched():
                self.wait(dist.all_reduce(out, operation, group=self.process_group, async_op=True))
        return out

    def send_on(self, block: Sequence[Tensor], shapes: Sequence[torch.Size]) -> PendingBlock:
        """Start to send a block to the next rank and to receive one of these shapes from the rank before."""
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        peers = [dist.get_global_rank(self.process_group, r) for r in (after, before)]
        sent = [t.contiguous() for t in block]
        received = [t.new_empty(s) for t, s in zip(block, shapes, strict=True)]
        operations = []
        for send, receive in zip(sent, received, strict=True):
            if send.numel():
                operations.append(dist.P2POp(dist.isend, send, peers[0], self.process_group))
            if receive.numel():
                operations.append(dist.P2POp(dist.irecv, receive, peers[1], self.process_group))
        with self.watched():
            works = dist.batch_isend_irecv(operations) if operations else []
        return PendingBlock(self, works, received, sent)

    def agree(self, where: str, signature: str, *numbers: int) -> list[list[int]]:
        """Raise unless the signature is the same on every rank; returns the numbers of every rank.

        Comes first in every operation: shapes that differ would hang or corrupt a collective, and a missing rank is
        detected here.
        """
        self._arrive()
        encoded = signature.encode()[:SIGNATURE_BYTES]
        message = torch.zeros(SIGNATURE_BYTES + 8 * len(numbers), dtype=torch.uint8)
        message[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        if numbers:
            message[SIGNATURE_BYTES:] = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
        device = self._device()
        everyone = [torch.empty_like(message, device=device) for _ in range(self.size)]
        with self.watched():
            self.wait(dist.all_gather(everyone, message.to(device), group=self.process_group, async_op=True))
        everyone = [m.cpu() for m in everyone]
        signatures = [bytes(m[:SIGNATURE_BYTES].tolist()).rstrip(b"\0").decode(errors="replace") for m in everyone]
        for rank, other in enumerate(signatures):
            if other != signatures[0]:
                advice = "Call it with equal arguments on every rank."
                got = f"{signatures[0]} on rank 0 and {other} on rank {rank}"
                raise ValueError(sentence(where, "the same on every rank", got, advice))
        return [m[SIGNATURE_BYTES:].view(torch.int64).tolist() for m in everyone]

    # ------------------------------------------------------------------ ranks that do not answer

    def _device(self) -> torch.device:
        nccl = dist.get_backend(self.process_group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def wait(self, work) -> None:
        work.wait(timedelta(seconds=self.timeout))

    def _arrive(self) -> None:
        """Store how many operations of the group this rank has started."""
        name = self.process_group.group_name
        ARRIVALS[name] = ARRIVALS.get(name, 0) + 1
        self._store().set(f"cumulant/{name}/{self.rank}", str(ARRIVALS[name]))

    @staticmethod
    def _store():
        return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TimeoutError(self._failure(error)) from error

    def _failure(self, error: RuntimeError) -> str:
        """The message for a collective that failed, with the ranks that did not start it."""
        late, name = [], self.process_group.group_name
        try:
            store = self._store()
            for rank in range(self.size):
                key = f"cumulant/{name}/{rank}"
                started = int(store.get(key)) if store.check([key]) else 0
                if started < ARRIVALS.get(name, 0):
                    late.append(str(rank))
        except RuntimeError:  # the store lives in one of the processes
            late.append("0, which holds the store,")
        names = f"nothing from rank {' and '.join(late)}" if late else f"a failure ({str(error).splitlines()[0]})"
        expected = f"all {self.size} ranks within {self.timeout:g} s (this is rank {self.rank})"
        return sentence("Ranks", expected, names, "Look at what that rank printed; then start all of them again.")


ARRIVALS: dict[str, int] = {}  # operations of each group that this process has started


@dataclass
class PendingBlock:
    """A block in transfer."""

    ranks: Ranks
    works: list
    received: list[Tensor]
    sent: list[Tensor]  # referenced until the transfer is complete

    def wait(self) -> list[Tensor]:
        with self.ranks.watched():
            for work in self.works:
                self.ranks.wait(work)
        return self.received


class _Elementwise(torch.autograd.Function):
    """Acts on each number by itself, so that vmap is the function itself."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.ranks = inputs[1]

    @classmethod
    def vmap(cls, info, in_dims, x: Tensor, ranks: Ranks):
        return cls.apply(x, ranks), in_dims[0]


class _Spread(_Elementwise):
    """Identity; backwards, the sum over ranks."""

    @staticmethod
    def forward(x: Tensor, ranks: Ranks) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Total.apply(grad, ctx.ranks), None


class _Total(_Elementwise):
    """The sum over ranks; backwards, identity."""

    @staticmethod
    def forward(x: Tensor, ranks: Ranks) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ranks.reduced(x, dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Spread.apply(grad, ctx.ranks), None


class _Averaged(_Spread):
    """Identity; backwards, times the number of ranks."""

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * ctx.ranks.size, None


class _Largest(_Elementwise):
    """The maximum over ranks, of constants."""

    @staticmethod
    def forward(x: Tensor, ranks: Ranks) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ranks.reduced(x, dist.ReduceOp.MAX)
