"""What the command line imports before it answers, and the table of commands."""

from __future__ import annotations

import inspect
import json
import signal
import subprocess
import sys

import pytest

from mnemos import cli
from mnemos.cli import preset_table
from mnemos.cli.imports import take_imports
from mnemos.train import TrainConfig

HEAVY = ("torch", "transformers", "numpy", "matplotlib")
CODE = """
import json, sys
from mnemos.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print(json.dumps([status, sorted(sys.modules)]))
"""

WAIT = """
import signal, time
from mnemos.cli import register_command

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit one that ignores it

@register_command("wait")
def wait() -> None:
    'Wait for a signal.'
    print("waiting", flush=True)
    time.sleep(60)
"""


def run(*arguments: str, cwd=None) -> tuple[str, int, set[str]]:
    """What was printed, the exit status, and the modules that were imported."""
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, cwd=cwd)
    assert done.stdout, done.stderr
    *printed, last = done.stdout.splitlines()
    status, modules = json.loads(last)
    return "\n".join(printed), status, set(modules)


def test_an_interrupt_is_one_line_and_exit_status_130(tmp_path):
    (tmp_path / "parts.py").write_text(WAIT)
    command = [sys.executable, "-m", "mnemos", "wait", "--import", "./parts.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == "mnemos: interrupted\n"
    assert process.returncode == 130


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["presets"], ["presets", "--size", "nano"]])
def test_an_answer_without_a_model_imports_neither_torch_nor_transformers(arguments):
    printed, status, modules = run(*arguments)
    assert printed and status == 0
    assert not modules & {*HEAVY}


def test_a_folder_without_runs_is_reported_without_torch(tmp_path):
    _, status, modules = run("runs", cwd=tmp_path)
    assert status == 2 and not modules & {*HEAVY}


def test_runs_are_listed_without_torch(tmp_path):
    run_folder = tmp_path / "runs" / "first"
    run_folder.mkdir(parents=True)
    TrainConfig(name="first").save(run_folder / "config.yaml")
    record = {"step": 3, "kind": "train", "loss": 2.5, "tokens": 96}
    (run_folder / "metrics.jsonl").write_text(f"{json.dumps(record)}\n")
    for arguments in (["runs"], ["runs", "first"], ["runs", "--json"]):
        printed, status, modules = run(*arguments, cwd=tmp_path)
        assert status == 0 and "first" in printed and "2.5" in printed
        assert not modules & {*HEAVY}


def test_help_imports_no_command_and_no_parser():
    _, _, modules = run("--help")
    assert "tyro" not in modules
    assert not modules & {f"mnemos.cli.{name}" for name in cli.COMMANDS}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_imports_neither_torch_nor_another_command(name):
    if name == "train":
        pytest.skip("its flags are those of TrainConfig, whose package imports torch")
    printed, status, modules = run(name, "--help")
    assert status == 0 and f"mnemos {name}" in printed
    assert "torch" not in modules
    assert not modules & {f"mnemos.cli.{other}" for other in cli.COMMANDS if other != name}


def test_help_has_every_command_with_its_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert any(name in line and command.about in line for line in printed.splitlines()), name
    assert "--import MODULE" in printed


@pytest.mark.parametrize("command", [c for c in cli.COMMANDS.values() if not c.parses_arguments], ids=lambda c: c.name)
def test_the_line_of_a_command_is_the_first_of_its_docstring(command):
    assert (inspect.getdoc(command.load()) or "").partition("\n")[0] == command.about


def test_the_kept_table_of_presets_is_the_one_that_is_computed():
    """After a change of the presets: python -m mnemos.cli.preset_table."""
    assert preset_table.kept() == json.loads(json.dumps(preset_table.computed()))


def test_import_is_taken_from_any_place_but_not_from_behind_two_dashes():
    assert take_imports(["--import", "a", "runs", "--import=b"]) == (["runs"], ["a", "b"])
    assert take_imports(["runs", "--", "--import", "a"]) == (["runs", "--", "--import", "a"], [])
    with pytest.raises(ValueError, match="--import needs a module"):
        take_imports(["runs", "--import"])
