"""How the library refuses bad input: one sentence with object, argument, expected, got, and what to do."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def sentence(where: str, expected: str, got: object, advice: str) -> str:
    """``<Object>.<argument>: expected …, got …. <what to do>``"""
    return f"{where}: expected {expected}, got {got}. {advice}"


def holds(condition: Tensor) -> bool:
    """Whether ``condition`` is true everywhere; true also where values cannot be read (compiling, vmap, meta tensors,
    the capture of a CUDA graph).

    On CUDA the answer waits for the device. `known`, `somewhere` and `everywhere` do so too, and nothing else in
    attention, losses and layers: tests/test_devices.py has the list of callers, each with its reason.
    """
    if torch.compiler.is_compiling() or _captured(condition):
        return True
    try:
        return bool(condition.all())
    except RuntimeError:  # torch.func.vmap and fake tensors have no readable values
        return True


def known(condition: Tensor) -> bool:
    """Whether ``condition`` is true everywhere and that can be seen; false where values cannot be read."""
    if torch.compiler.is_compiling() or _captured(condition):
        return False
    try:
        return bool(condition.all())
    except RuntimeError:
        return False


def known_on_cpu(condition: Tensor) -> bool:
    """`known` where a look costs nothing, false elsewhere: for a branch that saves less than it would wait for."""
    return condition.is_cpu and known(condition)


def somewhere(condition: Tensor) -> bool:
    """Whether ``condition`` is true anywhere, for loops that end when it is not; false for meta tensors, which have no
    values."""
    return _read(condition, torch.any, False)


def everywhere(condition: Tensor) -> bool:
    """Whether ``condition`` is true everywhere, for what a method finds out about itself; true for meta tensors."""
    return _read(condition, torch.all, True)


def _read(condition: Tensor, over: Callable[[Tensor], Tensor], on_meta: bool) -> bool:
    try:
        return bool(over(condition))
    except RuntimeError:
        if condition.is_meta:
            return on_meta
        raise


def _captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which a look at values is an error that ends the capture."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def shape(tensor: Tensor) -> str:
    return "(" + ", ".join(map(str, tensor.shape)) + ")"


def from_numpy(*values: Any) -> tuple[Any, ...]:
    """NumPy arrays of numbers as tensors over the same memory, and everything else as it is.

    The one rule for NumPy: measures, their methods, `attend`, `attention` and `moments` take arrays where they take
    tensors, dtypes must agree as those of tensors must (an array of Python floats is float64), and results are tensors.

    >>> import numpy as np
    >>> from_numpy(np.ones(2), None)
    (tensor([1., 1.], dtype=torch.float64), None)
    """
    return tuple(_tensor(value) if isinstance(value, np.ndarray) else value for value in values)


def _tensor(array: np.ndarray) -> Tensor | np.ndarray:
    if array.dtype.kind not in "biuf":
        return array
    shared = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if shared else array.copy())


def require_float(where: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        advice = "Wrap it with torch.as_tensor(..., dtype=...)."
        raise TypeError(sentence(where, "a torch.Tensor", type(tensor).__name__, advice))
    if not tensor.is_floating_point():
        raise TypeError(sentence(where, "a floating dtype", tensor.dtype, "Call .to(torch.float64) or .float() first."))
    return tensor


def require_finite(where: str, tensor: Tensor) -> None:
    if not holds(tensor.isfinite()):
        got = f"{int((~tensor.isfinite()).sum())} entries that are NaN or infinite"
        raise ValueError(sentence(where, "finite values", got, "Remove or replace them."))


def require_alike(where: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Same dtype and device as ``other``."""
    if tensor.dtype != other.dtype:
        expected, advice = f"dtype {other.dtype} as {other_name}", f"Call .to({other.dtype}) on it."
        raise TypeError(sentence(where, expected, tensor.dtype, advice))
    require_device(where, tensor, other_name, other)


def require_device(where: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """On the device of ``other``."""
    if tensor.device != other.device:
        expected, advice = f"device {other.device} as {other_name}", f"Call .to({str(other.device)!r}) on it."
        raise ValueError(sentence(where, expected, tensor.device, advice))


def device_of(where: str, name: str) -> torch.device:
    """The device of a name, if it can hold numbers here: cpu, cuda, cuda:1, and others that torch has.

    >>> device_of("--device", "cpu")
    device(type='cpu')
    >>> device_of("--device", "gpu")
    Traceback (most recent call last):
    ValueError: --device: expected cpu or a CUDA device that torch sees, got gpu (no name of a device). Use cpu, cuda or
    cuda:1.
    """
    expected, advice = "cpu or a CUDA device that torch sees", "Use cpu, cuda or cuda:1."
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(sentence(where, expected, f"{name} (no name of a device)", advice)) from None
    why = _absence(device)
    if why is not None:
        raise ValueError(sentence(where, expected, f"{name} ({why[0]})", why[1]))
    return device


def _absence(device: torch.device) -> tuple[str, str] | None:
    """Why a device cannot hold numbers here, and what to do; None if it can."""
    if device.type == "meta":
        return "meta tensors hold no numbers", "Use cpu."
    if device.type == "cuda":
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} was built without CUDA", "Install a torch built for CUDA, or use cpu."
        count = torch.cuda.device_count()
        if not count:
            return "torch sees no CUDA device", "See whether nvidia-smi lists one, or use cpu."
        if (device.index or 0) >= count:
            return f"torch sees {', '.join(f'cuda:{i}' for i in range(count))}", "Name one of them, or use cpu."
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().splitlines()
        return (first[0].removesuffix(".")[:200] if first else type(error).__name__), "Use cpu."
    return None


def require_integer(where: str, value: object, least: int, most: int = sys.maxsize) -> None:
    """An int in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(sentence(where, "a whole number", repr(value), "Give an int."))
    if not least <= value <= most:
        upper = f" and at most {most}" if most < sys.maxsize else ""
        raise ValueError(sentence(where, f"at least {least}{upper}", value, "Give a number in this range."))


def require_log_weights(where: str, w: Tensor) -> None:
    """Logarithms of finite masses."""
    if w.numel() and not holds(w.detach().amax() < torch.inf):  # also false for NaN
        advice = "Weights are logarithms of finite masses; log 0 = -inf is legal."
        raise ValueError(sentence(where, "values below +inf", "NaN or +inf", advice))


def broadcast(where: str, *shapes: torch.Size) -> torch.Size:
    """The common shape of batch axes, or a sentence that shows them.

    By hand, because torch.broadcast_shapes imports sympy on its first call, a third of a second.
    """
    rank = max([0, *[len(s) for s in shapes]])
    common = []
    for axis in range(-rank, 0):
        sizes = [s[axis] for s in shapes if len(s) >= -axis and s[axis] != 1]
        if any(size != sizes[0] for size in sizes):
            got = " and ".join(str(tuple(s)) for s in shapes)
            advice = "Give equal sizes, or 1, on every leading axis."
            raise ValueError(sentence(where, "batch axes that broadcast", got, advice))
        common.append(sizes[0] if sizes else 1)
    return torch.Size(common)
