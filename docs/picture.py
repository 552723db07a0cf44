"""The picture of the README: the heads on a page that `cumulant observe` has written.

    cumulant observe minilm --out observed/minilm && python docs/picture.py observed/minilm docs/_static/report.png

Needs playwright and a chromium that it finds, or one on the path.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SIZE = {"width": 1280, "height": 710}


def picture(page: Path, to: Path) -> None:
    """The screen of a page on which its heads begin, as PNG."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        tab = browser.new_page(viewport=SIZE)
        tab.goto(page.resolve().as_uri())
        tab.wait_for_load_state("networkidle")
        tab.evaluate(  # at once: the default of the page is to scroll smoothly
            "scrollTo({top: document.getElementById('heads').getBoundingClientRect().top + 10, behavior: 'instant'})"
        )
        tab.wait_for_timeout(500)
        tab.screenshot(path=to)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/picture.py DIRECTORY_OF_A_RECORD PICTURE.png")
    picture(Path(sys.argv[1]) / "report.html", Path(sys.argv[2]))
