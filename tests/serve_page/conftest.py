"""One browser for all tests of the page; a fresh server and a fresh visit for each test."""

from __future__ import annotations

import pytest
from fake_server import Fake, serving
from webdriver import Browser, browsing


@pytest.fixture(scope="session")
def window(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser):
    window.prefers("light")
    window.size(1400)
    yield window
    troubles = window.run("return window.troubles ?? []")
    window.run("try { localStorage.clear(); sessionStorage.clear(); } catch {}")
    window.open("about:blank")
    assert troubles == []


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def page(browser: Browser, fake: Fake):
    """The page of the server, open."""
    with serving(fake) as url:
        fake.url = url
        browser.open(url)
        browser.find("#message")
        browser.until(lambda: browser.run("return Boolean(document.querySelector('.welcome, .problem, dialog'))"), "the page stays empty")
        yield browser
        browser.run("return 0")
