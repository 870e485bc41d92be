"""Every example in the docs and docstrings runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import mnemos

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(mnemos.__path__, "mnemos.")]


def blocks(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_examples_of_a_page_run_top_to_bottom(page):
    exec(compile(blocks(page), page.name, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_other_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target
