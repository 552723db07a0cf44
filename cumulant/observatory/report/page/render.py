"""One HTML file from the plain data of a record, condensed until it fits.

Numbers keep five digits, what JSON cannot say becomes null, and where a record is large, distributions, curves and
texts become coarser step by step. The result is compressed and written in letters that mean nothing to HTML.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path

from cumulant.checks import sentence
from cumulant.extras import missing_package
from cumulant.files import write
from cumulant.observatory.report.page.packing import packed, unpacked

HERE = Path(__file__).parent
FIGURES = ("steps", "map", "distribution", "looks", "head", "texts", "depth", "states", "spectra", "table")
SCRIPTS = ("dom", "unpack", "colour", "plot", "state", *FIGURES, "remarkable", "causes", "start")  # in this order
MAX_BYTES = 4_900_000
PARTS = {
    "remarkable",
    "types",
    "rules",
    "verdicts",
    "quantities",
    "layers",
    "heads",
    "states",
    "spectra",
    "texts",
    "definitions",
    "depth",
    "undefined",
}
DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
DRAWN = {"heads", "depth", "states", "spectra", "texts"}  # by the page itself, from what `pack` wrote
ANSWERS = {"yes": "✓", "no": "✕", "partly": "◐", "open": "○"}  # distinct without colour


@dataclass(frozen=True)
class Detail:
    """Resolution of the data: bins of a histogram, positions of a curve, tokens of all texts together."""

    bins: int
    positions: int
    tokens: int


DETAIL_LEVELS = (
    Detail(48, 64, 4096),
    Detail(32, 32, 1024),
    Detail(16, 16, 512),
    Detail(8, 8, 128),
    Detail(0, 0, 0),
)


def render_page(data: dict, path: Path) -> None:
    """Write the page of ``data`` to ``path`` in one step.

    The file needs nothing but a browser: style, program and data are inside, and its policy forbids every request and
    every script but its own. Strings of models and texts are shown, never read as HTML. Where a record is large,
    distributions, curves and texts are coarser so that the page stays below 5 MB; the page says so.

    data   meta, remarkable (heads), types (with all heads of each), rules (of the types), verdicts, quantities, layers,
           heads, depth, states, spectra, texts, undefined (reasons); any may be missing, numbers may be None.
           causes: what the model does without heads, as `report.causes.causes_part` puts it
           parts: "layer.head" → [name, share, chance, random, shuffled] of the named parts of the texts
           series: steps, log (whether their axis is), and parts, the heads, depth, states, spectra and texts of all
           steps but the last, which is the page itself
    """
    _check(data)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write(Path(path), page(data))


def page(data: dict) -> str:
    """The text of the page, as detailed as its size allows."""
    template = _environment().get_template("template.html")
    program = "".join((HERE / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    program = f'(() => {{\n"use strict";\n{program}}})();\n'
    heads, types = data.get("heads") or [], data.get("types") or []
    typed = {(head["layer"], head["head"]) for kind in types for head in kind["heads"]}
    parts = {
        **{key: plain(data.get(key) or []) for key in PARTS - DRAWN},
        "heads": heads,
        "untyped": len(heads) - len(typed),
        "meta": plain(data.get("meta") or {}),
        "causes": plain(data.get("causes") or {}),
        "series": data.get("series"),
        "program": program,
        "policy": base64.b64encode(hashlib.sha256(program.encode()).digest()).decode(),
        "style": (HERE / "page.css").read_text("utf-8"),
    }
    written = b""
    for step, detail in enumerate(DETAIL_LEVELS):
        html = template.render(parts, packed=pack(data, detail), detail=detail, coarse=step > 0)
        written = html.encode("utf-8", "replace")  # half of a surrogate pair becomes a question mark
        if len(written) <= MAX_BYTES:
            break
    return written.decode()


def number(value: object, digits: int = 4) -> str:
    """So many digits and a thin space between thousands; a dash for what is not known.

    >>> number(1234567), number(0.123456), number(-1e-7), number(None)
    ('1\\u202f234\\u202f567', '0.1235', '−1e-07', '–')
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace(",", "\u202f").replace("-", "−", 1) if value < 0 else text.replace(",", "\u202f")


def day(value: object) -> str:
    """A date as people write it; anything else as it came.

    >>> day("2026-11-16T00:03:00+00:00"), day("yesterday")
    ('16 November 2026, 00:03', 'yesterday')
    """
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return str(value)
    return f"{moment.day} {moment:%B %Y, %H:%M}"


def capital(text: object) -> str:
    """
    >>> capital("log-normalizer"), capital("")
    ('Log-normalizer', '')
    """
    return str(text)[:1].upper() + str(text)[1:]


def bars(item: dict) -> dict | None:
    """Lengths in percent of a value and its null on a common scale from 0 to ``end``; None where one is missing or not
    positive.

    A share is drawn as a part of the whole.

    >>> bars({"value": 2.0, "null": 4.0}), bars({"value": 0.2, "null": 0.1, "unit": "share"})
    ({'value': 50.0, 'null': 100.0, 'end': 4}, {'value': 20.0, 'null': 10.0, 'end': 1.0})
    """
    value, null = plain(item.get("value")), plain(item.get("null"))
    if not isinstance(value, int | float) or not isinstance(null, int | float) or min(value, null) <= 0:
        return None
    longest = max(value, null, 1.0 if item.get("unit") == "share" else 0.0)
    return {"value": 100 * value / longest, "null": 100 * null / longest, "end": longest}


def _check(data: object) -> None:
    if not isinstance(data, dict):
        got, advice = type(data).__name__, "Pass the plain data of a record."
        raise TypeError(sentence("render_page.data", "a dictionary", got, advice))
    for key in PARTS & data.keys():
        if not isinstance(data[key], list | tuple | None):
            got, advice = type(data[key]).__name__, "Leave it out, or give an empty list, where there is nothing."
            raise TypeError(sentence(f"render_page.data[{key!r}]", "a list", got, advice))


def _environment():
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise missing_package("A page", "jinja2", "report") from error
    return _compiled()


@cache
def _compiled():
    """The templates, compiled once."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "day": day, "capital": capital}
    environment.globals |= {"bars": bars, "signs": ANSWERS}
    return environment


def pack(data: dict, detail: Detail) -> str:
    """``data`` at this detail as base64 of gzip of JSON.

    >>> pack({"heads": []}, DETAIL_LEVELS[0])[:6]
    'H4sIAA'
    """
    body = json.dumps(packed(condensed(data, detail)), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # half of a surrogate pair is legal in a string, not in UTF-8
    return base64.b64encode(gzip.compress(body.encode("utf-8", "replace"), 9, mtime=0)).decode("ascii")


def unpack(letters: str) -> dict:
    """What the page reads, the inverse of `pack`.

    >>> unpack(pack({"spectra": [{"block": 0, "eigenvalues": [1.0, float("nan")]}]}, DETAIL_LEVELS[0]))["spectra"]
    [{'block': 0, 'eigenvalues': [1, None]}]
    """
    return unpacked(json.loads(gzip.decompress(base64.b64decode(letters))))


def condensed(data: dict, detail: Detail) -> dict:
    """The parts of ``data`` that figures are drawn from, plain and no finer than ``detail``."""
    heads = [{**head, "values": _statistics(head.get("values") or {}, detail)} for head in data.get("heads") or []]
    parts = {key: data.get(key) or [] for key in ("quantities", "layers", "depth", "states", "spectra")}
    parts |= {"heads": heads, "texts": _texts(data.get("texts") or [], detail.tokens)}
    for name in ("causes", "parts"):
        if data.get(name):
            parts[name] = data[name]
    parts["model"] = (data.get("meta") or {}).get("model")
    if data.get("series"):
        parts["series"] = _series(data["series"], detail)
    return plain(parts)  # type: ignore[return-value]


def _series(series: dict, detail: Detail) -> dict:
    """The steps of a training; all of them together have as many tokens of text as a page without steps."""
    each = replace(detail, tokens=detail.tokens // max(len(series["steps"]), 1))
    wholes = [condensed(part, each) for part in series["parts"]]
    parts = [{key: whole[key] for key in part} for whole, part in zip(wholes, series["parts"], strict=True)]
    for part in parts if detail.bins == 0 else ():  # where nothing else fits, steps have means alone
        for head in part["heads"]:
            head["values"] = {name: {"value": cell.get("value")} for name, cell in head["values"].items()}
    return {"steps": series["steps"], "log": series["log"], "parts": parts}


def plain(value: object) -> object:
    """Lists, dictionaries, strings and finite numbers of five digits; anything not finite is None, and characters that
    turn the direction of a text are named.

    >>> plain({"a": (1.0, 0.123456789, float("inf")), "b": True})
    {'a': [1, 0.12346, None], 'b': True}
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.5g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, str):
        return visible(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    got, advice = type(value).__name__, "Call .item() or .tolist() on it first."
    raise TypeError(sentence("render_page.data", "dictionaries, lists, strings and numbers", got, advice))


def visible(text: str) -> str:
    """Characters that turn the direction of what stands beside them, as their names.

    >>> visible("a\\u202eb"), visible("plain")
    ('a⟨U+202E⟩b', 'plain')
    """
    return DIRECTIONS.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def coarser(histogram: list, bins: int) -> list:
    """Neighbouring bins joined until at most ``bins`` are left; empty ends are dropped, an open end closes on its edge.

    >>> coarser([[0, 1, 0], [1, 2, 3], [2, 3, 4], [3, float("inf"), 5]], 2)
    [[1, 3, 7], [3, 3, 5]]
    """
    rows = [row for row in histogram if row[2]]
    if not rows or bins < 1:
        return []
    step = -(-len(rows) // bins)
    groups = [rows[i : i + step] for i in range(0, len(rows), step)]
    return [[*_edges(group[0][0], group[-1][1]), sum(row[2] for row in group)] for group in groups]


def _edges(low: float | None, high: float | None) -> tuple[float, float]:
    finite = [edge for edge in (low, high) if edge is not None and math.isfinite(edge)]
    return (finite[0], finite[-1]) if finite else (0.0, 0.0)


def thinner(curve: list, points: int) -> list:
    """At most ``points`` points of a curve, first and last among them.

    >>> thinner([[i, i] for i in range(5)], 3)
    [[0, 0], [2, 2], [4, 4]]
    """
    if len(curve) <= points:
        return curve
    if points < 2:
        return curve[:points]
    return [curve[round(i * (len(curve) - 1) / (points - 1))] for i in range(points)]


def _statistics(values: dict, detail: Detail) -> dict:
    return {
        name: {
            **cell,
            "histogram": coarser(cell.get("histogram") or [], detail.bins),
            "by_position": thinner(cell.get("by_position") or [], detail.positions),
        }
        for name, cell in values.items()
        if cell is not None
    }


def _texts(texts: list, tokens: int) -> list:
    """The beginning of each text, so that all together have at most ``tokens`` tokens."""
    if not tokens:
        return []
    share = max(tokens // max(len(texts), 1), 1)
    return [
        {
            **text,
            "tokens": text.get("tokens", [])[:share],
            "length": len(text.get("tokens", [])),
            "looks": {head: rows[:share] for head, rows in (text.get("looks") or {}).items()},
            "values": {
                quantity: {head: row[:share] for head, row in heads.items() if row is not None}
                for quantity, heads in (text.get("values") or {}).items()
            },
        }
        for text in texts[:tokens]
    ]
