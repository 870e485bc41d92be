"""lm-evaluation-harness: our checkpoints under its own `hf` model, and the adapter that streams."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from oracles import BYTES, answering, uniform

from mnemos.eval import LanguageModel, perplexity
from mnemos.eval.harness import StreamingLM, run_harness
from mnemos.models.remote import add_remote_code

TASKS = {
    "local_choice": """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
""",
    "local_words": """
task: local_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["."], do_sample: false, max_gen_toks: 12}}
filter_list: [{{name: bare, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match}}]
""",
    "local_rolling": """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, text):
    """A folder with a task of each kind, and three documents; the answer is the word said to be the answer."""
    folder = tmp_path_factory.mktemp("tasks")
    words = ["river", "stone", "cloud"]
    records = [
        {"question": f"The word is {word}. Say it:", "choices": words, "label": i, "text": text[i * 100 : 400 + i]}
        for i, word in enumerate(words)
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    for name, yaml in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.format(data=data))
    return folder, records


def say_it(text: str):
    if "Say it:" not in text:
        return None
    return "Say it:", text.split("The word is ")[-1].split(".")[0]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


def test_an_oracle_scores_1_on_local_tasks_and_a_model_that_finds_all_alike_does_not(tasks):
    folder, _ = tasks
    found = run_harness(answering(say_it), BYTES, ["local_choice", "local_words"], folder)
    assert found["local_choice"]["acc,none"] == 1 and found["local_words"]["exact_match,bare"] == 1
    lost = run_harness(uniform(), BYTES, ["local_choice", "local_words", "local_rolling"], folder)
    assert lost["local_choice"]["acc,none"] == pytest.approx(1 / 3)  # its first choice is the first
    assert lost["local_words"]["exact_match,bare"] == 0
    assert lost["local_rolling"]["bits_per_byte,none"] == pytest.approx(8)


def test_the_adapter_and_lm_evals_own_model_agree_on_one_of_our_checkpoints(tasks, saved, model, hf_bytes):
    """`--model hf` opens the folder as it is."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder, records = tasks
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    arguments = {"pretrained": str(saved), "dtype": "float32", "max_length": 2048}
    names = list(TASKS)
    theirs = simple_evaluate(
        "hf", model_args=arguments, tasks=names, task_manager=manager, device="cpu", batch_size=2, bootstrap_iters=0
    )["results"]
    ours = run_harness(model, hf_bytes, names, folder)
    for task, metric in (("local_choice", "acc,none"), ("local_words", "exact_match,bare")):
        assert ours[task][metric] == theirs[task][metric]
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        assert ours["local_rolling"][metric] == pytest.approx(theirs["local_rolling"][metric], rel=1e-5)
    own = perplexity(model, hf_bytes, [record["text"] for record in records])
    assert own.bits_per_byte == pytest.approx(theirs["local_rolling"]["bits_per_byte,none"], rel=1e-5)


def test_continuations_of_one_context_are_scored_from_one_reading_of_it():
    model = uniform()
    adapter = StreamingLM(model, BYTES, piece=64)
    context = BYTES.encode("x" * 150)
    requests = [(("", ""), context, BYTES.encode(word)) for word in ("ab", "c", "def")]
    found = adapter._loglikelihood_tokens(requests)
    assert [score for score, _ in found] == pytest.approx([-np.log(256) * n for n in (2, 1, 3)])
    assert model.calls == [(1, 64), (1, 64), (1, 22), (3, 2)]


def test_greedy_is_true_exactly_where_decoding_would_say_the_continuation(model, hf_bytes, text):
    lm = LanguageModel(model, hf_bytes)
    past = lm.read([lm.encode(text[:80])])
    ids = model.generate(torch.tensor([lm.encode(text[:80])]), max_new_tokens=4, do_sample=False)[0, 80:].tolist()
    (_, yes), (_, no) = lm.option_details(past, [ids, [*ids[:3], (ids[3] + 1) % 256]])
    assert yes and not no


def test_a_folder_is_opened_by_name(saved, text):
    adapter = StreamingLM(str(saved))
    assert adapter.tok_encode("ab") == adapter.tokenizer.encode("ab") and adapter.eot_token_id == 256
    assert adapter.prefix_token_id == 256


def test_sampling_is_refused():
    from lm_eval.api.instance import Instance

    request = Instance("generate_until", {}, ("a", {"do_sample": True, "temperature": 0.7}), 0)
    with pytest.raises(ValueError, match="decodes greedily"):
        StreamingLM(uniform(), BYTES).generate_until([request])


@pytest.mark.slow
def test_the_command_lm_eval_runs_on_a_checkpoint_with_remote_code(tasks, saved, tmp_path):
    """In a process that never imports mnemos by itself."""
    import shutil

    folder, _ = tasks
    copied = tmp_path / "model"
    shutil.copytree(saved, copied)
    add_remote_code(copied)
    arguments = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={copied},trust_remote_code=True,dtype=float32,max_length=512",
    ]
    assert "bits_per_byte" in lm_eval_on_the_command_line([*arguments, "--tasks", "local_rolling"], folder, tmp_path)


def lm_eval_on_the_command_line(arguments: list[str], tasks, home) -> str:
    """What `lm_eval run` prints, in a process that does not import mnemos by itself."""
    command = [sys.executable, "-m", "lm_eval", "run", *arguments, "--include_path", str(tasks)]
    place = {"HF_HOME": str(home / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--device", "cpu", "--batch_size", "1"], capture_output=True, text=True, env=os.environ | place
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_an_attached_model_runs_under_lm_evals_own_model_and_under_ours(tasks, tmp_path, hf_bytes, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    from mnemos.attach import attach, save_merged
    from mnemos.cli import main

    folder, _ = tasks
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=260, **sizes, bos_token_id=None, eos_token_id=None)).eval()
    attached = attach(base, layers=[1], window=16, memory={"preset": "deltanet", "heads": 2})
    with torch.no_grad():
        attached.memories["1"].gate.normal_()
    place = save_merged(attached, tmp_path / "attached", hf_bytes)
    arguments = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={place},trust_remote_code=True,dtype=float32,max_length=2048",
    ]
    printed = lm_eval_on_the_command_line([*arguments, "--tasks", ",".join(TASKS)], folder, tmp_path)
    theirs = float(next(line for line in printed.splitlines() if "bits_per_byte" in line).split("|")[7])
    capsys.readouterr()
    flags = [
        "--suite",
        "harness",
        "--harness",
        *TASKS,
        "--include-path",
        str(folder),
        "--output",
        str(tmp_path / "e.json"),
    ]
    assert main(["eval", str(place), *flags]) in (0, None)
    rows = {row["task"]: row for row in json.loads((tmp_path / "e.json").read_text())["suites"]["harness"]["rows"]}
    assert set(rows) == set(TASKS)
    assert rows["local_rolling"]["bits_per_byte,none"] == pytest.approx(theirs, abs=2e-4)


def test_remote_code_is_for_our_models_only(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="only for mnemos"):
        add_remote_code(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("wonderwords") is None,
    reason="RULER's generators need wonderwords: pip install 'lm_eval[ruler]'",
)
def test_rulers_own_generator_runs_offline_through_the_adapter(saved):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    meta = {"max_seq_lengths": [4096], "pretrained": str(saved)}
    done = simple_evaluate(
        StreamingLM(str(saved)),
        tasks=["niah_single_1"],
        task_manager=TaskManager(metadata=meta),
        limit=1,
        bootstrap_iters=0,
    )
    assert 0 <= done["results"]["niah_single_1"]["4096,none"] <= 1
