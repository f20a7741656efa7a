"""The built site, served on this machine, and one browser for all tests of it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = Path("/usr/bin/chromium")
# No host but this machine is found, so a request to another one fails at once.
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def _missing(what: str) -> NoReturn:
    """Skips, with what to do about it; fails where everything has to be there."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the built site: ``SITE``, or where ``make docs`` puts it."""
    if not os.environ.get("DOCS_BROWSER"):
        pytest.skip("`make docs-browser` runs the tests of the site")
    built = Path(__file__).parents[2] / "docs" / "_build" / "html"
    folder = Path(os.environ.get("SITE") or built).resolve()
    if not (folder / "index.html").is_file():
        _missing(f"{folder} has no index.html: run `make docs`, or name a built site by SITE")
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """A failed request is the browser's to report."""


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """``http://127.0.0.1:port/`` of a server of the site."""
    handler = functools.partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser(site: Path) -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed: run `pip install playwright`")
    if not CHROMIUM.is_file():
        _missing(f"there is no {CHROMIUM}: run `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()
