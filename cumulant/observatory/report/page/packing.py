"""The data of a page in few letters, and back: `packed` and `unpacked`, which unpack.js does in the browser.

    numbers of heads  a column for each quantity and statistic in the place of a record for each head
    histograms        their edges once for all heads, of each histogram the places of its edges and its counts
    curves, texts     whole numbers from 0 to LEVELS between the least and the largest
    where heads look  distances and percents

Whole numbers are written in letters (`letters`), which JSON and gzip leave alone. Counts are exact; curves and numbers
of tokens to a thousandth of their range, means to five digits, what stands beside them to four.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

LAST, MORE = 35, 93  # code of the first letter of a last digit, and of one that another follows
LAST_DIGITS, MORE_DIGITS = 46, 34  # so that neither " nor \ is among the letters
LEVELS = 999
DIGITS = {"std": 4, "se": 2, "null_random": 4, "null_shuffled": 4}
DIGITS |= dict.fromkeys(("p05", "p25", "p50", "p75", "p95"), 4)
DRAWN = ("histogram", "by_position")  # of a cell, what is no single number


def letters(numbers: Iterable[int]) -> str:
    """Whole numbers from 0 on, small ones in one letter.

    >>> letters([0, 1, 45, 46, 1000]), numbers_of(letters([0, 1, 45, 46, 1000]))
    ('#$Pi$k@', [0, 1, 45, 46, 1000])
    """
    out = []
    for number in numbers:
        while number >= LAST_DIGITS:
            out.append(chr(MORE + number % MORE_DIGITS))
            number //= MORE_DIGITS
        out.append(chr(LAST + number))
    return "".join(out)


def numbers_of(text: str) -> list[int]:
    """The inverse of `letters`."""
    out, value, weight = [], 0, 1
    for code in map(ord, text):
        if code >= MORE:
            value, weight = value + (code - MORE) * weight, weight * MORE_DIGITS
        else:
            out.append(value + (code - LAST) * weight)
            value, weight = 0, 1
    return out


def folded(number: int) -> int:
    """Any whole number as one from 0 on: 0, −1, 1, −2, …

    >>> [folded(n) for n in (0, -1, 1, -2)], [unfolded(n) for n in range(4)]
    ([0, 1, 2, 3], [0, -1, 1, -2])
    """
    return 2 * number if number >= 0 else -2 * number - 1


def unfolded(number: int) -> int:
    return -(number + 1) // 2 if number % 2 else number // 2


# ---------------------------------------------------------------------- numbers between two ends


def levels(values: Sequence[float | None]) -> list | None:
    """[least, largest, letters]: 0 for what is not known, else 1 + the level; None where nothing is known.

    >>> levels([1.0, None, 2.0]), of_levels(levels([1.0, None, 2.0]))
    ([1.0, 2.0, '$#k@'], [1.0, None, 2.0])
    """
    known = [v for v in values if v is not None]
    if not known:
        return None
    low, high = min(known), max(known)
    step = (high - low) / LEVELS or 1.0
    return [low, high, letters(0 if v is None else 1 + round((v - low) / step) for v in values)]


def of_levels(packed: list | None) -> list[float | None]:
    """The inverse of `levels`."""
    if packed is None:
        return []
    low, high, text = packed
    return [None if n == 0 else low + (n - 1) * (high - low) / LEVELS for n in numbers_of(text)]


# ---------------------------------------------------------------------- heads


def packed(parts: dict) -> dict:
    """What `render.condensed` gives, in few letters."""
    edges, positions = DistinctValues(), DistinctValues()
    edges.number(sorted(edge for cell in _every_cell(parts) for row in _bins(cell) for edge in row[:2]))
    positions.number(tuple(p for p, _ in _points(cell)) for cell in _every_cell(parts))
    out = parts | _part(parts, edges, positions)
    if parts.get("series"):
        steps = [part | _part(part, edges, positions) for part in parts["series"]["parts"]]
        out["series"] = parts["series"] | {"parts": steps}
    return out | {"edges": list(edges), "positions": list(positions)}


def unpacked(parts: dict) -> dict:
    """The inverse of `packed`, to its precision."""
    edges, positions = parts["edges"], parts["positions"]
    out = {key: value for key, value in parts.items() if key not in ("edges", "positions", "cells")}
    out |= _whole(parts, edges, positions)
    if parts.get("series"):
        steps = [
            {key: value for key, value in part.items() if key != "cells"} | _whole(part, edges, positions)
            for part in parts["series"]["parts"]
        ]
        out["series"] = parts["series"] | {"parts": steps}
    return out


class DistinctValues(dict):
    """Values that occur again and again → their places in a list that has each once."""

    def number(self, values: Iterable) -> None:
        for value in values:
            self.setdefault(value, len(self))


def _every_cell(parts: dict) -> Iterator[dict]:
    for part in (parts, *(parts.get("series") or {"parts": ()})["parts"]):
        for head in part.get("heads") or []:
            yield from (head.get("values") or {}).values()


def _bins(cell: dict) -> list:
    return [row for row in cell.get("histogram") or [] if None not in row]


def _points(cell: dict) -> list:
    return [point for point in cell.get("by_position") or [] if None not in point]


def _part(part: dict, edges: DistinctValues, positions: DistinctValues) -> dict:
    out = {}
    if "heads" in part:
        heads = part["heads"]
        out["heads"] = [{key: item for key, item in head.items() if key != "values"} for head in heads]
        out["cells"] = _cells([head.get("values") or {} for head in heads], edges, positions)
    if "texts" in part:
        out["texts"] = [_text(text) for text in part["texts"]]
    return out


def _whole(part: dict, edges: list, positions: list) -> dict:
    """The inverse of `_part`."""
    out = {}
    if "heads" in part:
        values: list[dict] = [{} for _ in part["heads"]]
        for name, table in part["cells"].items():
            for i, own in enumerate(values):
                cell = {key: column[i] for key, column in table.items() if column[i] is not None}
                if "histogram" in cell:
                    cell["histogram"] = _of_histogram(cell["histogram"], edges)
                if "by_position" in cell:
                    at, *drawn = cell["by_position"]
                    cell["by_position"] = [list(point) for point in zip(positions[at], of_levels(drawn), strict=True)]
                if cell:
                    own[name] = cell
        out["heads"] = [head | {"values": own} for head, own in zip(part["heads"], values, strict=True)]
    if "texts" in part:
        out["texts"] = [_of_text(text) for text in part["texts"]]
    return out


def _cells(values: list[dict], edges: DistinctValues, positions: DistinctValues) -> dict[str, dict[str, list]]:
    """name → statistic → one for each head, None where it has none."""
    out: dict[str, dict[str, list]] = {}
    for name in dict.fromkeys(name for cells in values for name in cells):
        column = [cells.get(name) or {} for cells in values]
        table: dict[str, list] = {}
        for key in dict.fromkeys(key for cell in column for key in cell if key not in DRAWN):
            table[key] = [_short(cell.get(key), DIGITS.get(key, 5)) for cell in column]
        drawn = {
            "histogram": [_histogram(cell, edges) for cell in column],
            "by_position": [_curve(cell, positions) for cell in column],
        }
        out[name] = table | {key: row for key, row in drawn.items() if any(item is not None for item in row)}
    return out


def _short(value, digits: int):
    if not isinstance(value, float):
        return value
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _histogram(cell: dict, edges: DistinctValues) -> str | None:
    """Of all bins how far the low edge is from the high one before, then how wide they are, then their counts."""
    rows = _bins(cell)
    if not rows:
        return None
    lows, highs = ([edges[row[side]] for row in rows] for side in (0, 1))
    gaps = [folded(low - before) for low, before in zip(lows, [0, *highs], strict=False)]
    widths = [high - low for low, high in zip(lows, highs, strict=True)]
    return letters([*gaps, *widths, *(row[2] for row in rows)])


def _of_histogram(text: str, edges: list) -> list[list]:
    numbers = numbers_of(text)
    bins, before, out = len(numbers) // 3, 0, []
    for i in range(bins):
        low = before + unfolded(numbers[i])
        before = low + numbers[bins + i]
        out.append([edges[low], edges[before], numbers[2 * bins + i]])
    return out


def _curve(cell: dict, positions: DistinctValues) -> list | None:
    """[which positions, least, largest, letters]."""
    points = _points(cell)
    drawn = levels([value for _, value in points])
    return None if drawn is None else [positions[tuple(position for position, _ in points)], *drawn]


# ---------------------------------------------------------------------- texts


def _text(text: dict) -> dict:
    values = {
        quantity: {head: levels(row) for head, row in rows.items()} for quantity, rows in text.get("values", {}).items()
    }
    return text | {"values": values, "looks": {head: _looks(rows) for head, rows in text.get("looks", {}).items()}}


def _looks(rows: list[list[int]]) -> str:
    """The number of keys of every token, then by rank of the key: 0 for the first token, else 1 + the folded distance;
    then the percents in the same order."""
    most = max((len(row) // 2 for row in rows), default=0)
    keys, shares = [], []
    for rank in range(most):
        for i, row in enumerate(rows):
            if len(row) > 2 * rank:
                key, share = row[2 * rank : 2 * rank + 2]
                keys.append(1 + folded(i - key) if key else 0)
                shares.append(share)
    return letters([len(rows), *(len(row) // 2 for row in rows), *keys, *shares])


def _of_text(text: dict) -> dict:
    values = {
        quantity: {head: of_levels(row) for head, row in rows.items()} for quantity, rows in text["values"].items()
    }
    return text | {"values": values, "looks": {head: _of_looks(rows) for head, rows in text["looks"].items()}}


def _of_looks(text: str) -> list[list[int]]:
    count, *numbers = numbers_of(text)
    lengths, pairs = numbers[:count], iter(zip(numbers[count:], numbers[count + sum(numbers[:count]) :], strict=False))
    rows: list[list[int]] = [[] for _ in lengths]
    for rank in range(max(lengths, default=0)):
        for i, length in enumerate(lengths):
            if length > rank:
                key, share = next(pairs)
                rows[i] += [i - unfolded(key - 1) if key else 0, share]
    return rows
