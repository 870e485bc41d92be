"""A run writes into its own folder alone, and removes only what a run has written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml

from mnemos.cli import main
from mnemos.cli.train import read_arguments
from mnemos.train import Trainer
from mnemos.train.checkpoints import Checkpoints, Contents
from mnemos.train.distributed import World
from mnemos.train.runs import check_free, prepare_folder
from small import small

ALONE = World(0, 1, torch.device("cpu"))


class Named:
    """A tokenizer, as far as a run's folder needs one."""

    def save(self, folder) -> None:
        (folder / "tokenizer.json").write_text("{}")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def begin(config, resume: bool = False) -> Path:
    path, lock = prepare_folder(config, ALONE, resume, Named())
    assert lock is not None
    lock.release()
    return path


def save_checkpoint(run: Path, step: int) -> Path:
    checkpoints = Checkpoints(run / "checkpoints", ALONE, 9, asynchronous=False, say=print)
    assert checkpoints.save({"x": torch.zeros(3)}, Contents(step, {}, {}))
    return checkpoints.path(step)


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize(
    "name, content",
    [
        ("checkpoints/model.bin", "weights of another program"),
        ("checkpoints/step-000500/model.bin", "weights of another program"),
        ("metrics.jsonl", '{"loss": 1}\n'),
        ("samples.jsonl", "thesis\n"),
        ("best.json", "{}"),
        ("config.yaml", "model: resnet\ndata: imagenet\n"),
        ("tokenizer/tokenizer.json", "{}"),
        (".lock", "the lock of another program"),
        ("deep/er/notes.txt", "notes"),
    ],
)
def test_a_folder_of_someone_else_is_refused_and_left_as_it_was(tmp_path, name, content, resume):
    file = tmp_path / "runs" / "a" / name
    file.parent.mkdir(parents=True)
    file.write_text(content)
    before = contents(tmp_path / "runs")
    with pytest.raises(ValueError, match=r"holds no run of mnemos: choose another|was not written by mnemos"):
        begin(small(tmp_path), resume)
    assert contents(tmp_path / "runs") == before


def test_the_command_refuses_such_a_folder_in_one_sentence(tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "metrics.jsonl").write_text("three years of work")
    small(tmp_path).save(tmp_path / "config.yaml")
    arguments = ["--config", str(tmp_path / "config.yaml"), "--folder", str(tmp_path), "--name", "thesis"]
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr().err
    assert "thesis is not empty and holds no run of mnemos" in said and len(said.splitlines()) == 1
    assert contents(tmp_path / "thesis") == {"metrics.jsonl": b"three years of work"}


BAD_NAMES = [
    "../../x",
    "a/b",
    "a\\b",
    "/tmp/x",
    "..",
    ".",
    "",
    ".hidden",
    "a\nb",
    "a\x1b[2Jb",
    " a",
    "a ",
    "x" * 300,
    "\u202ea",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_is_one_plain_component(tmp_path, name):
    config = small(tmp_path / "inner" if (tmp_path / "inner").mkdir() is None else tmp_path, name=name)
    for use in (check_free, begin):
        with pytest.raises(ValueError, match="must be one path component"):
            use(config)
    assert not (tmp_path / "x").exists() and not (tmp_path / "inner" / "runs").exists()


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_in_a_config_file_or_a_flag_is_checked_too(tmp_path, name):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": name, "steps": 1}))
    with pytest.raises(ValueError, match="must be one path component"):
        read_arguments(["--config", str(tmp_path / "config.yaml")])
    with pytest.raises(ValueError, match="must be one path component"):
        read_arguments(["--steps", "1", f"--name={name}"])


def test_usual_names_are_fine(tmp_path):
    for name in ("a", "atlas-mag-nano", "Lauf 3", "größer", "v1.2_final", "x" * 200):
        check_free(small(tmp_path, name=name))


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize("name", ["checkpoints", "tokenizer"])
def test_a_link_to_elsewhere_is_not_followed(tmp_path, name, resume):
    run = begin(small(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    save_checkpoint(elsewhere, 3).rename(elsewhere / "checkpoints" / ".step-000003.part")
    for file in (run / "tokenizer").iterdir():
        file.unlink()
    (run / name).is_dir() and (run / name).rmdir()
    (run / name).symlink_to(elsewhere / "checkpoints")
    before = contents(elsewhere)
    with pytest.raises(ValueError, match="is a link: a run's folders must be its own"):
        begin(small(tmp_path), resume)
    assert contents(elsewhere) == before


def test_a_run_that_was_killed_early_begins_anew_and_takes_only_its_own_files_away(tmp_path):
    run = begin(small(tmp_path))
    (run / "metrics.jsonl").write_text('{"step": 0, "kind": "event", "message": "x"}\n{"ste')
    (run / "samples.jsonl").write_text('{"step": 1, "text": "x"}\n')
    (run / "notes.txt").write_text("mine")
    half = save_checkpoint(run, 3)
    (half / "manifest.json").unlink()
    (half / "notes.txt").write_text("mine")
    (run / "checkpoints" / "keep-me").mkdir()
    (run / "checkpoints" / "keep-me" / "state.json").write_text("mine")
    assert begin(small(tmp_path)) == run
    kept = {name for name, content in contents(run).items() if content == b"mine"}
    assert kept == {"notes.txt", "checkpoints/step-000003/notes.txt", "checkpoints/keep-me/state.json"}
    assert not (run / "metrics.jsonl").exists() and not (run / "samples.jsonl").exists()
    assert not (half / "state.json").exists() and not (half / "tensors").exists()


def test_a_record_of_someone_else_in_a_run_is_refused(tmp_path):
    run = begin(small(tmp_path))
    (run / "metrics.jsonl").write_text("mine")
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"metrics\.jsonl was not written by mnemos"):
            begin(small(tmp_path), resume)
    assert (run / "metrics.jsonl").read_text() == "mine"


def test_a_run_of_another_version_is_known_as_one(tmp_path):
    run = begin(small(tmp_path))
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["parallel"]
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"no_longer_known": 1}))
    assert begin(small(tmp_path), resume=True) == run
    save_checkpoint(run, 1)
    (run / "config.yaml").unlink()
    assert begin(small(tmp_path), resume=True) == run


def test_empty_folders_and_what_a_kill_before_the_first_file_leaves_are_no_obstacle(tmp_path):
    run = tmp_path / "runs" / "a"
    (run / "checkpoints").mkdir(parents=True)
    (run / ".lock").touch()
    (run / ".config.yaml.0123456789abcdef.part").write_text("mod")
    assert begin(small(tmp_path)) == run
    assert not list(run.glob("*.part"))


def test_resume_in_the_working_folder_means_the_run_in_it(tmp_path, monkeypatch):
    run = begin(small(tmp_path))
    for place, resume in ((run, "."), (run / "tokenizer", "..")):
        monkeypatch.chdir(place)
        config, resumed = read_arguments(["--resume", resume])
        assert resumed and os.path.samefile(Path(config.folder) / config.name, run)


def test_the_demo_does_not_write_over_a_page_of_someone_else(tmp_path, capsys):
    (tmp_path / "index.html").write_text("my page")
    assert main(["demo", "--output", str(tmp_path), "--seconds", "0.1"]) == 2
    assert "index.html was not written by mnemos demo: choose another output" in capsys.readouterr().err
    assert (tmp_path / "index.html").read_text() == "my page"


def test_an_ablation_does_not_write_over_results_of_someone_else(tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text("{}\n")
    assert main(["ablate", "--preset", "titans-lmm", "--steps", "1", "--output", str(tmp_path)]) == 2
    assert "results.jsonl was not written by mnemos ablate" in capsys.readouterr().err
    assert contents(tmp_path) == {"results.jsonl": b"{}\n"}


def test_a_tokenizer_does_not_replace_one_that_is_there(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be " * 99)
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("mine")
    arguments = ["tokenizer", "train", str(tmp_path / "text.txt"), "--vocab-size", "270", "--output", str(out)]
    assert main(arguments) == 2
    assert "holds a tokenizer already" in capsys.readouterr().err
    assert contents(out) == {"tokenizer.json": b"mine"}


def test_a_config_with_notes_of_its_owner_is_not_written_over(tmp_path):
    config = small(tmp_path, name="mine")
    config.folder = str(tmp_path)
    (tmp_path / "mine").mkdir()
    notes = config.to_yaml() + "# my careful notes\n"
    (tmp_path / "mine" / "config.yaml").write_text(notes)
    with pytest.raises(ValueError, match="edited by hand"):
        Trainer(config).train()
    assert (tmp_path / "mine" / "config.yaml").read_text() == notes
