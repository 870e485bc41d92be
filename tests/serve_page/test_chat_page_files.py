"""The files of the chat page: they refer only to each other, and have nothing inline."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

FILES = [Path(str(entry)) for entry in resources.files("mnemos.serve.page").iterdir() if entry.is_file()]


def test_the_files_of_the_page_refer_only_to_each_other():
    names = {path.name for path in FILES}
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= names
    referred = set()
    for path in FILES:
        if path.suffix in {".js", ".html", ".css"}:
            text = path.read_text()
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), (
                path.name
            )
            assert len(text.splitlines()) <= 400, path.name
            referred |= set(re.findall(r'from "\./([\w.]+)"', text)) | set(
                re.findall(r'(?:src|href)="page/([\w.]+)"', text)
            )
    assert referred <= names and names - referred <= {"index.html", "__init__.py"}


def test_the_html_has_nothing_inline():
    text = next(path for path in FILES if path.name == "index.html").read_text()
    assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:", text) and not re.search(
        r"<script(?![^>]*\ssrc=)", text
    )
