"""A real server on the embedded model, and a headless browser that can reach nothing but this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright
from serve_process import ServeProcess, serve

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
SLOWLY = ("--enforce-eager", "--ops", "torch", "--attention", "torch")  # the page looks twice a second
SERVE = ("--max-model-len", "2048", "--num-gpu-blocks-override", "400", *SLOWLY)


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Iterator[ServeProcess]:
    """The one that every test may ask, and none may kill."""
    with serve(*SERVE) as server:
        yield server


@pytest.fixture
def doomed_server() -> Iterator[ServeProcess]:
    """One to be killed."""
    with serve(*SERVE) as server:
        yield server
