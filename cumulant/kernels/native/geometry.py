"""How tensors of any layout lie in memory, as the native kernel is told: batch axes, heads that share keys, strides.

Every tensor of a call has a stride along every batch axis, 0 where it is shared. Axes that all tensors walk through
evenly are joined to one; an axis along which the key side does not change is the fold: its heads are rows of one group.
"""

from __future__ import annotations

from typing import NamedTuple

AXES = 4  # batch axes that the kernel takes
KEY_SIDE = ("atoms", "values", "per_atom", "value_centre", "atom_centre", "marked", "starts")


class Geometry(NamedTuple):
    """Sizes of at most four batch axes, the number of heads that share keys, and strides of each tensor.

    strides   name → (one per axis, then that from head to head)
    folded    which of the given axes are in the fold
    """

    axes: tuple[int, ...]
    fold: int
    strides: dict[str, tuple[int, ...]]
    folded: tuple[int, ...]


def geometry(lead: tuple[int, ...], strides: dict[str, tuple[int, ...]]) -> Geometry | None:
    """The geometry of tensors that have these strides along the batch axes ``lead``; None if four axes are too few.

    >>> geometry((2, 3, 4), {"eta": (120, 40, 10), "atoms": (30, 10, 0)})
    Geometry(axes=(1, 1, 1, 6), fold=4, strides={'eta': (0, 0, 0, 40, 10), 'atoms': (0, 0, 0, 10, 0)}, folded=(2,))
    """
    names = list(strides)
    axes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []  # size, stride of every tensor, axes joined
    for i, size in enumerate(lead):
        if size == 1:
            continue
        steps = tuple(strides[name][i] for name in names)
        if axes and all(before == step * size for before, step in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * size, steps, (*axes[-1][2], i))
        else:
            axes.append((size, steps, (i,)))
    key_side = [i for i, name in enumerate(names) if name in KEY_SIDE]
    shared = [axis for axis in axes if all(axis[1][i] == 0 for i in key_side)]
    fold = max(shared, key=lambda axis: axis[0], default=None)
    if fold is not None:
        axes.remove(fold)
    if len(axes) > AXES:
        return None
    blank = (1, (0,) * len(names), ())
    axes = [blank] * (AXES - len(axes)) + axes
    heads, steps, folded = fold or blank
    return Geometry(
        tuple(size for size, _, _ in axes),
        heads,
        {name: (*(step[i] for _, step, _ in axes), steps[i]) for i, name in enumerate(names)},
        folded,
    )
