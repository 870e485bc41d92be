"""The commands in docs/data.md run as they stand (tests/test_docs.py runs its Python)."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mnemos.cli import main

PAGE = Path(__file__).parents[2] / "docs/data.md"


@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are for a shell")
def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MNEMOS_CACHE", str(tmp_path / "cache"))
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)).splitlines()
    assert sum(command.startswith("mnemos ") for command in commands) == 5
    for command in commands:
        if command.startswith("mnemos "):
            assert main(shlex.split(command)[1:]) == 0, command
        else:
            subprocess.run(["bash", "-c", f'python() {{ "{sys.executable}" "$@"; }}\n{command}'], check=True)
    printed = capsys.readouterr().out
    assert "Row 1: 128 tokens" in printed and "1000 tokens in my-tokenizer" in printed
    assert "vocabulary 1,000" in printed
