"""The page of an audit: one HTML file that makes no request. Strings of texts are shown, never read as HTML."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from functools import cache
from pathlib import Path

from cumulant.cache.audit.page.data import page_data
from cumulant.cache.audit.record import AuditRecord
from cumulant.extras import missing_package
from cumulant.files import write
from cumulant.observatory.report.page.render import HERE as SHARED
from cumulant.observatory.report.page.render import number, plain

HERE = Path(__file__).parent
SHARED_SCRIPTS = ("dom", "colour", "plot")  # of the page of the observatory: elements, colours, axes
SCRIPTS = ("selection", "compare", "heads", "tokens", "worst", "begin")  # in this order


def render_audit(record: AuditRecord, path: str | Path) -> None:
    """Write the page of an audit to ``path`` in one step.

    It says where the damage is (layers × heads), which tokens were lost, what the worst predictions look like, and how
    methods compare in bytes, KL and what is still found.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write(Path(path), audit_page(record))


def audit_page(record: AuditRecord) -> str:
    """The text of the page."""
    data = page_data(record)
    scripts = [SHARED / f"{name}.js" for name in SHARED_SCRIPTS] + [HERE / f"{name}.js" for name in SCRIPTS]
    program = "".join(script.read_text("utf-8") for script in scripts)
    program = f'(() => {{\n"use strict";\n{program}}})();\n'
    body = json.dumps(plain(data), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return _template().render(
        data=plain({name: data[name] for name in ("settings", "sentence", "rows", "full", "notes", "facts")}),
        packed=base64.b64encode(gzip.compress(body.encode("utf-8", "replace"), 9, mtime=0)).decode("ascii"),
        program=program,
        policy=base64.b64encode(hashlib.sha256(program.encode()).digest()).decode(),
        style=(SHARED / "page.css").read_text("utf-8") + (HERE / "audit.css").read_text("utf-8"),
    )


@cache
def _template():
    try:
        import jinja2
    except ImportError as error:
        raise missing_package("A page", "jinja2", "report") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "share": share}
    return environment.get_template("audit.html")


def share(value: float | None) -> str:
    """A share in percent.

    >>> share(0.0625), share(None)
    ('6.2 %', '–')
    """
    return "–" if value is None else f"{100 * value:.2g} %".replace("1e+02", "100")
