"""Servers for the tests of this folder."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("httpx", reason="needs httpx, which is in the extra dev")

from serving import Running, make_service


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server without keys for all tests of a module."""
    with Running(make_service(tmp_path_factory.mktemp("store"))) as running:
        yield running


@pytest.fixture
def serve_with(tmp_path):
    """Start servers with other options; all are stopped at the end of the test."""
    started = []

    def start(kind: str = "titans-mag", **options) -> Running:
        running = Running(make_service(tmp_path / f"store-{len(started)}", kind, **options))
        running.__enter__()
        started.append(running)
        return running

    yield start
    for running in started:
        running.__exit__()
