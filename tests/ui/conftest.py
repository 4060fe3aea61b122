"""A server with the bundled model and guesses, and a browser where one is found."""

import os
import shutil

import pytest

from tests.server.driver import COMMAND, fake_arguments, running

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ["--num-threads", "1", "--port", "0", "--cache-bytes", "200000000", "--speculative-config", '{"method": "mtp"}']


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with running([COMMAND, "serve", "nano", *FLAGS], tmp_path_factory.mktemp("page") / "log") as server:
        yield server.wait_ready()
        assert server.process.poll() is None, "the server outlives all that the tests did to it"
        assert "Traceback" not in server.log, server.log


@pytest.fixture
def start(tmp_path):
    """Start a server with the fake engine; it is stopped at the end."""
    started = []

    def start(**options):
        context = running(fake_arguments(None, **options), tmp_path / "log")
        started.append(context)
        return context.__enter__().wait_ready()

    yield start
    for context in started:
        context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def chromium():
    """A headless browser for one module, as its driver holds on to the event loop. Without either what needs it is skipped."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev or ui)")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        names = ", ".join(BROWSERS)
        pytest.skip(f"no browser is found; install one of {names}, or set CHROMIUM")  # CI installs one where it can
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watch:
    """What a page did that it must not do."""

    def __init__(self, page, origin):
        self.said = []
        self.asked_elsewhere = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self._note(request.url, origin))

    def _note(self, url, origin):
        if not url.startswith((origin, "blob:")):
            self.asked_elsewhere.append(url)


@pytest.fixture
def visit(chromium):
    """Open a server's page; at the end no page has reported anything, or asked anybody but its own server."""
    contexts, watches = [], []

    def visit(server, view="", **options):
        context = chromium.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        origin = f"http://{server.host}:{server.port}"
        page.watch = Watch(page, origin)
        watches.append(page.watch)
        page.goto(f"{origin}/{view}")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert [said for watch in watches for said in watch.said] == []
    assert [url for watch in watches for url in watch.asked_elsewhere] == []
