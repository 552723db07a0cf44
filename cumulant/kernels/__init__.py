"""How sums of exponentials are computed: G, means, variances and their gradients, without the queries × atoms matrix.

A call of `moments` goes through

    operator.py          `moments` and `fisher_product`: names of statistics, choice of a backend, the sink
    request.py           checks the arguments and flattens their batch axes to groups
    inputs.py            `Inputs` (flattened tensors) and `Plan` (what to compute), the arguments of every kernel
    support.py           `Band` and `FlatSupport`: which atoms are visible to a query, block by block
    moments.py           `Moments`, the record that is returned, and `merge`, the sum of two sets of atoms

and one of five backends. "native" is C++ on the CPU (docs/kernels.md explains it); where it can, it takes tensors as
they lie, before anything is flattened:

    native/direct.py     one look-up by shapes and strides, one call; its gradients
    native/geometry.py   batch axes and strides of tensors as the C++ takes them; heads that share keys
    native/arguments.py  the arguments of a call (arguments.h, field by field); call.py: its entry points
    native/flat.py       the same kernel on flattened inputs, for all else that it serves
    native/library.py    finds, checks and loads the library for this processor, or says why there is none
    native/targets.py    instruction sets, compiler and flags; setup.py uses it too
    native/kernel.cpp    entry points; x86_64_v4.cpp, x86_64_v3.cpp, aarch64.cpp include it, one library each
        arguments.h  pool.h  vectors.h  microkernel.h      what is given, threads and memory, lanes, the one product
        panel.h  forward.h  few_rows.h  backward.h  fisher.h      queries in lanes, and the four passes
        losses.h                                                  the two passes of a loss
    native/normals.py    normal laws of many sequences, for `cumulant.filters`, in normals.h

"triton" is the same on CUDA devices: triton/direct.py makes the plans of native/direct.py, triton/launch.py calls
kernels in Triton (triton/__init__.py has a map).

"dense" (few scores) goes to dense.py, the reference. "streaming", "fused", and "native" and "triton" on
flattened inputs, go through

    stream_function.py   an autograd.Function; compiled.py is the same as a custom operator for torch.compile
    evaluate.py          forward and backward pass by a fast kernel, by the reference on rows where that is not exact
    streaming.py         the forward sweep over blocks; columns.py: per-atom quantities; pullback.py: the backward sweep
    fused.py             torch's attention kernel for G and means; torch_attention.py: that of the CPU and that of CUDA,
                         attention_check.py: whether it is right on a device; layout.py: memory layouts that it reads
    recompute.py         second derivatives and forward mode, by the reference on a few rows at a time

native/ has the kernel in C++: direct.py calls it on tensors as they lie, flat.py on flattened inputs. profile.py is
`attention_profile`: moments with masses by distance and of marked keys, forward only. ragged.py: heads whose atoms lie
one after another in one storage, of their own number in each.

`fisher_product` shares all but the sweep, which is in fisher.py. autocast.py casts arguments as torch.autocast does.

Losses G − ⟨η, x⁺⟩ over many atoms have a sweep of their own: losses.py is what autograd sees, sweep.py the sweep in
torch, with tiles and positives in strips.py, native/losses.py that in C++ (losses.h).

Over several processes: collectives.py (`Ranks`) has sums and rings with gradients, sharded_sums.py the statistics as
numbers that add over ranks, sharded.py `sharded_moments` and `deal`, sharded_losses.py the losses.
"""

from cumulant.kernels.collectives import Ranks
from cumulant.kernels.dense import dense_moments
from cumulant.kernels.moments import STATISTICS, Moments
from cumulant.kernels.operator import fisher_product, moments
from cumulant.kernels.profile import AttentionProfile, attention_profile
from cumulant.kernels.sharded import deal, sharded_moments

__all__ = [
    "STATISTICS",
    "AttentionProfile",
    "Moments",
    "Ranks",
    "attention_profile",
    "deal",
    "dense_moments",
    "fisher_product",
    "moments",
    "sharded_moments",
]
