"""The axis names of the library and the array types built from them; the protocol of what advances in steps.

Shapes follow scaled_dot_product_attention, ``(*batch, query, dim)``:

    *batch   independent problems (sequences, heads); broadcasts between a measure and its queries
    q        queries: natural parameters η that share one measure
    n        atoms (keys, patterns, candidates)
    d        dimension of an atom and of η
    e        dimension of a value
    s        samples drawn per query

A leading ``...`` in an annotation stands for ``*batch q``, or for ``*batch`` alone where the caller passed a single
query of shape ``(d,)``.
"""

from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

Queries = Float[Tensor, "... d"]
PerQuery = Float[Tensor, "..."]
Matrices = Float[Tensor, "... d d"]
Draws = Float[Tensor, "... s d"]
Flags = Bool[Tensor, "..."]
Codes = Int[Tensor, "..."]

State = TypeVar("State")
Info = TypeVar("Info", covariant=True)


@runtime_checkable
class Stepper(Protocol[State, Info]):
    """Whatever advances in steps: solvers, dynamics, filters, samplers. Classes and modules may be one.

    ``init`` makes the state, ``step`` returns the next state and a record of what the step gave besides; what else they
    take is the stepper's own.
    """

    def init(self, *args: Any, **kwargs: Any) -> State: ...

    def step(self, state: State, *args: Any, **kwargs: Any) -> tuple[State, Info]: ...
