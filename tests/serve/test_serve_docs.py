"""The examples of docs/serving.md run as they stand, but for the port; and the files of examples/serve name real options."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from mnemos.cli import COMMANDS, _parse

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text()


def block(language: str) -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_curl_example_of_the_page_is_answered(server, tmp_path):
    script = block("sh").replace("http://127.0.0.1:8000", server.url)
    commands = [line for line in re.split(r"\n(?=curl )", script.strip()) if line]
    assert len(commands) >= 15
    for command in commands:
        words = shlex.split(command)
        words[1:1] = ["--fail-with-body", "--max-time", "60"]
        found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, (command, found.stdout)
        if '"stream": true' in command:
            assert found.stdout.rstrip().endswith("data: [DONE]")
        elif "-o" not in words and "/metrics" not in command:
            assert json.loads(found.stdout), command
    assert (tmp_path / "ann.safetensors").stat().st_size > 1000


def test_the_python_example_of_the_page_runs(server):
    pytest.importorskip("openai", reason="needs the package openai, which is in the extra dev")
    code = block("py").replace("http://127.0.0.1:8000", server.url).replace('model="x"', 'model="tiny"')
    names: dict = {}
    exec(compile(code, "serving.md", "exec"), names)
    assert names["answer"].session["id"] == "ann"


@pytest.mark.parametrize("name", ["mnemos.service", "Containerfile"])
def test_the_commands_of_the_examples_are_understood(name):
    text = (ROOT / "examples" / "serve" / name).read_text()
    if name == "Containerfile":
        words = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
    else:
        words = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1])
    assert Path(words[0]).name == "mnemos" and words[1] == "serve"
    assert callable(_parse(COMMANDS["serve"], words[2:]))
