"""One HTML file from the plain data of a record."""

from __future__ import annotations

import base64
import hashlib
import math
from datetime import datetime
from functools import cache
from pathlib import Path

from cumulant.checks import sentence
from cumulant.files import write
from cumulant.observatory.report.page.condense import DETAIL_LEVELS, pack, plain

HERE = Path(__file__).parent
FIGURES = ("steps", "map", "distribution", "head", "texts", "states", "spectra", "table")
SCRIPTS = ("dom", "colour", "plot", "state", *FIGURES, "start")  # in this order
MAX_BYTES = 4_900_000
PARTS = {"verdicts", "quantities", "layers", "heads", "states", "spectra", "texts", "definitions"}
ANSWERS = {"yes": "✓", "no": "✕", "partly": "◐", "open": "○"}  # distinct without colour


def render_page(data: dict, path: Path) -> None:
    """Write the page of ``data`` to ``path`` in one step.

    The file needs nothing but a browser: style, program and data are inside, and its policy forbids every request and
    every script but its own. Strings of models and texts are shown, never read as HTML. Where a record is large,
    distributions, curves and texts are coarser so that the page stays below 5 MB; the page says so.

    data   meta, verdicts, quantities, layers, heads, states, spectra, texts; any may be missing, numbers may be None.
           series: steps, log (whether their axis is), and parts, the heads, states, spectra and texts of all steps but
           the last, which is the page itself
    """
    _check(data)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write(Path(path), page(data))


def page(data: dict) -> str:
    """The text of the page, as detailed as its size allows."""
    template = _environment().get_template("template.html")
    program = "".join((HERE / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    program = f'(() => {{\n"use strict";\n{program}}})();\n'
    parts = {
        **{key: data.get(key) or [] for key in PARTS},
        "meta": data.get("meta") or {},
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
    """Lengths in percent of a value and its null on a common scale from 0; None where one is missing or not positive.

    A share is drawn as a part of the whole.

    >>> bars({"value": 2.0, "null": 4.0}), bars({"value": 0.2, "null": 0.1, "unit": "share"})
    ({'value': 50.0, 'null': 100.0}, {'value': 20.0, 'null': 10.0})
    """
    value, null = plain(item.get("value")), plain(item.get("null"))
    if not isinstance(value, int | float) or not isinstance(null, int | float) or min(value, null) <= 0:
        return None
    longest = max(value, null, 1.0 if item.get("unit") == "share" else 0.0)
    return {"value": 100 * value / longest, "null": 100 * null / longest}


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
    except ImportError as missing:
        advice = "Run: pip install cumulant[report]"
        raise ImportError(sentence("render_page", "the package jinja2", "none installed", advice)) from missing
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
