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
    window.troubles = []
    yield window
    window.run("try { localStorage.clear(); sessionStorage.clear(); } catch {}")
    window.open("about:blank")
    assert window.troubles == []


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def page(browser: Browser, fake: Fake):
    """A browser beside a server, whose page is not open yet."""
    with serving(fake) as fake.url:
        yield browser
