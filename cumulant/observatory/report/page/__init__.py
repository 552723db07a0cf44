"""The page of a record: one HTML file that shows what was observed, without any request to a network."""

from cumulant.observatory.report.page.render import render_page

__all__ = ["render_page"]
