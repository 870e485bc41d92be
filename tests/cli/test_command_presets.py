"""`mnemos presets`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import mnemos
from mnemos.cli import main
from mnemos.cli.preset_purposes import PURPOSES
from mnemos.models import presets


def test_the_table_has_every_preset_and_its_count(capsys):
    assert main(["presets", "--size", "nano"]) == 0
    printed = capsys.readouterr().out
    for name in presets.names():
        assert name in printed
    assert "1.03M" in printed and "340m" in printed


def test_every_preset_has_a_purpose_and_a_paper(capsys):
    assert list(PURPOSES) == presets.names()
    assert main(["presets", "--size", "nano"]) == 0
    printed = capsys.readouterr().out
    for purpose, paper in PURPOSES.values():
        assert purpose in printed and paper in printed


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_terminal_is_too_narrow_for_a_number(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    assert main(["presets"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed and "linear-attention" in printed and "muon + momentum" in printed
    for count in ("1.03M", "6.00M", "120.7M", "374.0M", "815.9M", "1.12B"):
        assert any(count in line for line in printed.splitlines() if "titans-lmm" in line)


def test_a_preset_is_printed_in_full(capsys):
    assert main(["presets", "atlas-mag", "--size", "340m"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["parameters"] == presets.count(presets.config("atlas-mag", "340m"))
    assert config["memory"]["rule"] == "muon" and config["memory"]["retain_init"] == 0.999


def test_what_is_unknown_is_a_sentence_and_status_2(capsys):
    assert main(["presets", "atlas-mg"]) == 2
    assert "preset 'atlas-mg' is unknown; did you mean atlas-mag? Choose one of" in capsys.readouterr().err
    assert main(["presets", "--size", "huge"]) == 2
    assert "size 'huge' is unknown" in capsys.readouterr().err


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mnemos {mnemos.__version__}\n"


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "mnemos", "presets"], capture_output=True, text=True)
    assert "titans-mag" in done.stdout and done.returncode == 0, done.stderr
