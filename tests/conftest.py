"""Everything runs in float64 unless a test says otherwise, on one thread per worker."""

import importlib.util
import os
import shutil
import signal

import pytest
import torch

if os.environ.get("CUMULANT_TYPECHECK"):
    from jaxtyping import install_import_hook

    # not the kernels: torch reads the schema of a custom operator off the undecorated function; not nn: it uses Self
    rooms = [
        "solve",
        "special",
        "geometry",
        "testing",
        "attention",
        "residual",
        "hopfield",
        "contrastive",
        "regression",
    ]
    rooms += ["measures", "potentials", "duality", "link", "boltzmann", "dynamics", "filters", "samplers"]
    checked = [f"cumulant.{room}" for room in rooms]
    install_import_hook(checked, "beartype.beartype")

torch.set_num_threads(1)
# a shell that starts tests in the background has them ignore Ctrl-C, which some of them send
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window, or a reason why there is none."""
    found = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    if found is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("install chromium and playwright to run")
    from playwright.sync_api import sync_playwright

    quiet = ["quic", "gpu", "background-networking", "component-update", "sync"]
    flags = ["--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=found, args=flags)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser):
    """visit(path) opens a page of ours; at the end nothing may have been complained about, asked for, or run."""
    messages, requests, opened = [], [], set()

    def open_page(path, width: int = 1280, height: int = 800, **options):
        opened.add(path.as_uri())
        page = browser.new_context(viewport={"width": width, "height": height}, **options).new_page()
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (messages.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        page.wait_for_selector(".canvas > *")
        return page

    yield open_page
    for context in browser.contexts:
        assert all(page.is_hidden("#trouble") for page in context.pages)
        context.close()
    assert messages == []
    assert requests
    assert all(url in opened or url.startswith(("data:", "blob:")) for url in requests), requests
