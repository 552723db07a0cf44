"""`moments` on tensors of a GPU as they lie: the plan of the native kernel, and its call by the kernels in Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from cumulant.kernels.native.arguments import Call
from cumulant.kernels.native.call import PLAIN
from cumulant.kernels.native.direct import TRACES, Arguments, DirectPlan
from cumulant.kernels.triton import library

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256


class TritonPlan(DirectPlan):
    """Results are not looked at: that would wait for the device. Queries that see what is not finite have NaN by the
    kernel's own account, and nothing is computed again."""

    @classmethod
    def reads(cls, x: Arguments) -> bool:
        if any(t is not None and (type(t) not in PLAIN or t.device != x.eta.device or t.is_neg()) for t in x):
            return False
        if x.eta.dtype not in DTYPES or max(x.eta.shape[-1], 0 if x.values is None else x.values.shape[-1]) > WIDEST:
            return False
        return not library.refusal(x.eta.device.type, x.eta.device.index)

    @classmethod
    def forms(cls, names: Set[str], x: Arguments) -> bool:
        return not names & set(TRACES) and (x.values is None or "atom_mean" not in names)

    def forward(
        self, x: Sequence[Tensor | None], more: Callable[[Call], object] | None = None
    ) -> tuple[dict[str, Tensor], Call, bool]:
        from cumulant.kernels.triton import launch

        c, tensors = self._call(x)
        device = x[1].device  # pyright: ignore[reportOptionalMemberAccess]
        out = {name: torch.empty(shape, dtype=self.dtype, device=device) for name, shape in self.outputs.items()}
        launch.forward(c, self._named(tensors), out)
        return out, c, False

    def _named(self, x: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        eta, atoms, values, w, mask, sink = x
        per_atom, per_pair = (None, w) if self.per_pair else (w, None)
        named = {"eta": eta, "atoms": atoms, "values": values, "per_atom": per_atom, "per_pair": per_pair}
        return named | {"mask": mask, "sink": sink}
