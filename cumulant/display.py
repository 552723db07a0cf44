"""How objects show themselves: one short line, and in notebooks one small table; never the numbers of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from torch import Tensor

from cumulant.checks import shape

LONGEST = 60  # characters of a value that is no tensor
STYLE = "text-align:left;vertical-align:top"


def brief(value: object) -> str:
    """A tensor by shape and dtype, anything else in at most `LONGEST` characters.

    >>> import torch
    >>> brief(torch.ones(2, 3)), brief((torch.ones(2), None)), brief("a" * 70)[-3:]
    ('(2, 3) float32', '((2) float32, None)', 'aa…')
    """
    if isinstance(value, Tensor):
        return f"{shape(value)} {str(value.dtype).removeprefix('torch.')}"
    if type(value) is tuple:
        return "(" + ", ".join(map(brief, value)) + ")"
    text = repr(value)
    return text if len(text) <= LONGEST or not isinstance(value, str) else f"{text[:LONGEST]}…"


def one_line(name: str, parts: Mapping[str, object]) -> str:
    """``Name(part=…, part=…)``, tensors by shape and dtype.

    >>> import torch
    >>> one_line("Pair", {"mean": torch.ones(2), "steps": 3})
    'Pair(mean=(2) float32, steps=3)'
    """
    return f"{name}({', '.join(f'{part}={brief(value)}' for part, value in parts.items())})"


def span(tensor: Tensor) -> str:
    """From the least to the largest number of a tensor, empty where they cannot be read.

    >>> import torch
    >>> span(torch.tensor([1.0, 0.25])), span(torch.tensor([2.0])), span(torch.ones(0))
    ('0.25 … 1', '2', '')
    """
    try:
        low, high = (float(end) for end in tensor.detach().aminmax())
    except (RuntimeError, IndexError):  # none in it, or torch.func.vmap and fake tensors
        return ""
    return f"{low:.4g}" if low == high else f"{low:.4g} … {high:.4g}"


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """A table of two or three columns for notebooks: name, value, and of tensors the range of their numbers.

    >>> import torch
    >>> html_table("<b>", {"mean": torch.ones(2)})[:81]
    '<table><caption style="text-align:left;white-space:nowrap">&lt;b&gt;</caption><tr'
    """
    lines = [f'<table><caption style="text-align:left;white-space:nowrap">{escape(title)}</caption>']
    for name, value in rows.items():
        shown = [name, value if isinstance(value, str) else brief(value)]
        shown += [span(value)] if isinstance(value, Tensor) else [""]
        cells = "".join(f'<td style="{STYLE}">{escape(cell)}</td>' for cell in shown)
        lines.append(f"<tr>{cells}</tr>")
    return "".join([*lines, "</table>"])
