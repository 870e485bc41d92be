"""The commands in docs/data.md run as they stand (tests/test_docs.py runs its Python)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/data.md"


@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are for a shell")
def test_the_commands_of_the_page_run(tmp_path):
    pytest.importorskip("tokenizers")
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert commands.count("mnemos ") >= 5
    shims = f'mnemos() {{ "{sys.executable}" -m mnemos "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n'
    environment = os.environ | {"MNEMOS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        ["bash", "-e", "-c", shims + commands], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Row 1: 128 tokens" in done.stdout and "1000 tokens in my-tokenizer" in done.stdout
    assert "vocabulary 1,000" in done.stdout
