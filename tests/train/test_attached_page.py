"""The commands of docs/attach.md run one after the other, on a tiny base, with fewer steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from attached import base_folder

from helpers import random_words
from mnemos.cli import main
from mnemos.train.telemetry import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "attach.md").read_text()


def test_the_commands_of_the_page_lead_from_a_base_to_an_adapter(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MNEMOS_CACHE", str(tmp_path / "cache"))
    base_folder(tmp_path).rename("BASE")
    Path("notes.txt").write_text(random_words(6000))
    ((name, content),) = re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
    Path(name).write_text(content)
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    shorter = {"2000": "4", "512": "64"}
    for line in block.splitlines():
        words = [shorter.get(word, word) for word in shlex.split(line)]
        assert words[0] == "mnemos"
        assert main(words[1:]) in (0, None), line
        assert capsys.readouterr().out.strip(), line
    assert len(read_metrics(Path("runs/first"), "train")) >= 1 and Path("runs/first/inspect.html").exists()
    assert Path("adapter/adapter.safetensors").exists() and Path("whole/config.json").exists()
    assert main(["train", "--resume", "runs/first", "--steps", "6"]) == 0
    assert "6 steps" in capsys.readouterr().out
