"""`mnemos eval`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mnemos.cli import main
from mnemos.data import ByteTokenizer
from mnemos.eval import EvalSettings
from mnemos.eval.watch import checkpoint_steps, read_results, watch
from mnemos.models import MnemosForCausalLM, presets

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "memory_heads": 1, "num_attention_heads": 2}
TEXT = "The senate met early. It spoke of roads and of the army! Was peace at hand? Letters came. " * 30


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with an exported model of bytes, and a text."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    torch.manual_seed(0)
    MnemosForCausalLM(presets.config("titans-lmm", **SMALL)).save_pretrained(folder / "export")
    (folder / "config.yaml").write_text("model: {preset: titans-lmm}\n")
    (folder / "text.txt").write_text(TEXT)
    return folder


def options(run, *suites):
    few = [
        "--lengths",
        "400",
        "600",
        "--samples",
        "1",
        "--depths",
        "0.5",
        "--pairs",
        "2",
        "--stories",
        "qa1",
        "--needles",
        "passkey",
        "word",
    ]
    return ["eval", str(run), "--suite", *suites, "--text", str(run / "text.txt"), *few]


def test_suites_are_measured_into_one_file_with_a_table_of_each(run, tmp_path, capsys):
    output = tmp_path / "results.json"
    suites = ["perplexity", "needle", "babilong", "capacity", "length"]
    assert main([*options(run, *suites), "--output", str(output), "--contexts", "16", "64"]) == 0
    printed = capsys.readouterr().out
    results = json.loads(output.read_text())
    assert list(results["suites"]) == suites and str(output) in printed
    page = output.with_suffix(".html")
    assert f"Page: {page}" in printed and "<script" not in page.read_text()
    for suite in suites:
        assert f"{suite} (" in printed and results["suites"][suite]["rows"]
        assert f"<summary>{suite} " in page.read_text()
    kinds = {(row["what"], row["memory"]) for row in results["suites"]["perplexity"]["rows"]}
    assert {("all tokens", "learning"), ("all tokens", "frozen")} <= kinds
    assert {("context 16", "learning"), ("context 64", "frozen")} <= kinds
    assert {row["task"] for row in results["suites"]["needle"]["rows"]} == {"passkey", "word"}
    assert [row["length"] for row in results["suites"]["length"]["rows"]] == [400, 600]
    assert not list(tmp_path.glob("*.part"))


def test_a_suite_that_is_there_is_kept_until_its_settings_change(run, tmp_path):
    output = tmp_path / "results.json"
    command = [*options(run, "capacity"), "--output", str(output)]
    assert main(command) == 0
    results = json.loads(output.read_text())
    results["suites"]["capacity"]["rows"][0]["recalled"] = 77
    output.write_text(json.dumps(results))
    assert main(command) == 0
    assert json.loads(output.read_text())["suites"]["capacity"]["rows"][0]["recalled"] == 77
    assert main([*command, "--seed", "1"]) == 0
    assert json.loads(output.read_text())["suites"]["capacity"]["rows"][0]["recalled"] != 77
    assert main([*command, "--fresh"]) == 0
    assert json.loads(output.read_text())["suites"]["capacity"]["rows"][0]["recalled"] != 77


def test_a_text_that_was_written_again_is_read_again(run, tmp_path):
    output, text = tmp_path / "results.json", tmp_path / "text.txt"
    command = ["eval", str(run), "--suite", "perplexity", "--text", str(text), "--output", str(output)]
    tokens = []
    for content in ("One text. " * 9, "Another, which is longer. " * 9):
        text.write_text(content)
        assert main(command) == 0
        tokens.append(json.loads(output.read_text())["suites"]["perplexity"]["rows"][0]["tokens"])
    assert tokens[0] < tokens[1]


def test_what_was_measured_before_an_interruption_stays(run, tmp_path, monkeypatch):
    from mnemos.eval import suites

    output = tmp_path / "results.json"

    def killed(context, progress):
        raise KeyboardInterrupt

    broken = suites.Suite("length", "", killed, ())
    monkeypatch.setitem(suites.SUITES, "length", broken)
    assert main([*options(run, "capacity", "length"), "--output", str(output)]) == 130
    assert list(json.loads(output.read_text())["suites"]) == ["capacity"]


def test_results_of_another_model_are_not_mixed_in(run, tmp_path):
    output = tmp_path / "results.json"
    assert main([*options(run, "capacity"), "--output", str(output)]) == 0
    first = json.loads(output.read_text())["model"]
    torch.manual_seed(1)
    other = tmp_path / "other"
    MnemosForCausalLM(presets.config("titans-lmm", **SMALL)).save_pretrained(other)
    assert main(["eval", str(other), "--suite", "capacity", "--pairs", "1", "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["model"]["weights"] != first["weights"]
    assert [row["pairs"] for row in results["suites"]["capacity"]["rows"]] == [1]


def test_models_of_ids_have_their_suites_and_models_of_transformers_theirs(run, tmp_path, capsys):
    ids = tmp_path / "ids"
    MnemosForCausalLM(presets.config("deltanet", vocab_size=64, **SMALL)).save_pretrained(ids)
    assert main(["eval", str(ids), "--suite", "mqar", "mad", "--examples", "2", "--mqar", "based-test"]) == 2
    err = capsys.readouterr().err
    assert "mqar" in err and "num_kv_pairs=32 are needed" in err
    results = json.loads((ids / "eval.json").read_text())["suites"]
    assert [row["task"] for row in results["mad"]["rows"]] == [
        "in-context-recall",
        "noisy-in-context-recall",
        "fuzzy-in-context-recall",
        "selective-copying",
    ]
    assert "error" in results["mqar"]
    assert main(["eval", str(ids), "--suite", "capacity"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    peer = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=512)).save_pretrained(peer)
    command = ["eval", str(peer), "--suite", "length", "--text", str(run / "text.txt"), "--lengths", "100", "4096"]
    assert main(command) == 0
    assert [r["length"] for r in json.loads((peer / "eval.json").read_text())["suites"]["length"]["rows"]] == [100]


def test_results_are_drawn(run, tmp_path):
    picture = tmp_path / "results.png"
    command = [*options(run, "perplexity", "needle", "babilong", "capacity", "length"), "--plot", str(picture)]
    assert main([*command, "--output", str(tmp_path / "r.json")]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 20_000


def test_without_a_text_the_usual_suites_are_those_that_need_none(run, tmp_path, capsys):
    few = ["--lengths", "400", "--samples", "1", "--depths", "0.5", "--pairs", "2", "--stories", "qa1"]
    few += ["--needles", "passkey", "--no-generate"]
    for text, suites in (
        ([], ["needle", "babilong", "capacity"]),
        (["--text", str(run / "text.txt")], ["perplexity", "needle", "babilong", "capacity", "length"]),
    ):
        output = tmp_path / f"{len(suites)}.json"
        assert main(["eval", str(run), *few, *text, "--output", str(output)]) == 0
        assert list(json.loads(output.read_text())["suites"]) == suites
        assert ("perplexity and length are left out" in capsys.readouterr().err) == (not text)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{run}", "--suite", "niah"], "suite 'niah' is unknown; choose one of perplexity"),
        (["{run}", "--suite", "perplexity"], "perplexity: this suite needs a text: give --text"),
        (["{run}", "--suite", "harness"], "the suite harness needs tasks"),
        (["{run}", "--samples", "0"], "samples=0 must be at least 1"),
        (["{run}", "--suite", "length", "--text", "nowhere.txt"], "nowhere.txt is neither a file nor a folder"),
        (["{empty}"], "neither a saved model nor a run"),
        (["{bare}"], "bare has no checkpoint"),
    ],
)
def test_what_is_wrong_is_a_sentence_and_status_2(run, tmp_path, capsys, arguments, words):
    places = {"run": run, "empty": tmp_path / "empty", "bare": tmp_path / "bare"}
    for name in ("empty", "bare"):
        places[name].mkdir()
    (places["bare"] / "config.yaml").write_text("")
    output = ["--output", str(tmp_path / "r.json")]
    assert main(["eval", *(a.format(**places) for a in arguments), *output]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_an_export_is_opened_by_the_trainer(tmp_path):
    from mnemos.train import TrainConfig, Trainer, recipe

    config = recipe(TrainConfig(folder=str(tmp_path), name="real"), "debug")
    config.steps, config.data.cache_dir, config.model.preset = 2, str(tmp_path / "cache"), "titans-lmm"
    path = Trainer(config).train().path
    assert main(["eval", str(path), "--suite", "capacity", "--pairs", "1"]) == 0
    assert (path / "eval.json").is_file()


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A run with checkpoints whose models are made up instead of trained."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")

    def save(step: int) -> None:
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)

    def load_model(path, checkpoint, allow_missing=False):
        step = checkpoint_steps(path)[-1] if checkpoint in ("best", "last") else int(checkpoint)
        if step == 13:
            raise ValueError("step 13 is being written")
        torch.manual_seed(step)
        return MnemosForCausalLM(presets.config("titans-lmm", **SMALL))

    monkeypatch.setattr("mnemos.train.runs.load_model", load_model)
    monkeypatch.setattr("mnemos.train.runs.load_tokenizer", lambda path: ByteTokenizer())
    return run, save


def test_a_checkpoint_can_be_chosen(trained, run, capsys):
    folder, save = trained
    save(5), save(10)
    command = ["eval", str(folder), "--suite", "capacity", "--pairs", "1"]
    found = []
    for which in (["--checkpoint", "5"], ["--checkpoint", "last"], []):
        assert main([*command, *which]) == 0
        found.append(json.loads((folder / "eval.json").read_text())["model"]["weights"])
    assert found[0] != found[1] == found[2]
    assert main(["eval", str(run / "export"), "--suite", "capacity", "--checkpoint", "5"]) == 2
    assert "has no config.yaml" in capsys.readouterr().err


def test_watching_evaluates_every_checkpoint_once_and_survives_a_broken_line(trained, capsys):
    folder, save = trained
    save(5), save(10), save(13)
    command = ["eval", str(folder), "--suite", "capacity", "--pairs", "1", "--watch", "1", "--once"]
    assert main(command) == 0
    assert [row["step"] for row in read_results(folder)] == [5, 10]
    assert "step 13: step 13 is being written" in capsys.readouterr().out
    with open(folder / "eval_results.jsonl", "a") as file:
        file.write('{"step": 20, "sui')
    save(20)
    assert main(command) == 0
    assert [row["step"] for row in read_results(folder)] == [5, 10, 20]
    assert "step 5:" not in capsys.readouterr().out
    assert read_results(folder)[0]["suites"]["capacity"]["rows"][0]["pairs"] == 1


def test_watching_looks_again_after_a_while(trained):
    folder, save = trained
    save(5)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt
        save(10)

    with pytest.raises(KeyboardInterrupt):
        watch(folder, ["capacity"], EvalSettings(pairs=(1,)), poll=7, sleep=sleep, report=lambda line: None)
    assert waits == [7, 7] and [row["step"] for row in read_results(folder)] == [5, 10]


def test_another_file_is_not_overwritten(run, tmp_path, capsys):
    other = tmp_path / "notes.json"
    other.write_text('{"mine": 1}')
    assert main([*options(run, "capacity"), "--output", str(other)]) == 2
    assert "is not a results file" in capsys.readouterr().err and json.loads(other.read_text()) == {"mine": 1}


def test_help_is_there_without_importing_torch():
    code = (
        "import sys; from mnemos.cli import main\ntry: main(['eval', '--help'])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--suite" in done.stdout and "--haystack" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("False")


def test_the_commands_options_are_the_settings_of_the_suites():
    import inspect
    import typing

    from mnemos.cli.eval import evaluate

    assert typing.get_type_hints(evaluate)["options"] is EvalSettings
    assert inspect.signature(evaluate).parameters["options"].default == EvalSettings()
