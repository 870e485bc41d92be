"""A model that is not complete, finite and of its config is refused in one sentence, by every command and by Python."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from mnemos.cli import main
from mnemos.data import ByteTokenizer
from mnemos.eval.loading import load
from mnemos.models import MnemosConfig, MnemosForCausalLM, MnemosModel
from mnemos.models.remote import add_remote_code
from mnemos.train import Trainer, records, runs
from mnemos.train.files import write_json
from small import small

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAME = "model.layers.0.feedforward.down.weight"
DEEP = '{"a":' * 3000 + "1" + "}" * 3000


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved") / "whole"
    config = MnemosConfig(hidden_size=32, num_hidden_layers=2, layers=["mag", "lmm"], memory_heads=2)
    MnemosForCausalLM(config).save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


def tensors(change):
    """Damage to the tensors of the weights."""

    def damage(folder):
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def config(**values):
    """Damage to config.json."""

    def damage(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def sharded(change):
    """Damage to the index of weights in several files."""

    def damage(folder):
        model = MnemosForCausalLM.from_pretrained(folder)
        (folder / WEIGHTS).unlink()
        model.save_pretrained(folder, max_shard_size="30KB")
        index = json.loads((folder / INDEX).read_text())
        change(folder, index)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def cut(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def spoil(value):
    def change(found):
        found[NAME][0, :3] = value

    return change


def outside(folder, index):
    first = next(iter(index["weight_map"].values()))
    shutil.move(folder / first, folder.parent / first)
    index["weight_map"] = {k: f"../{v}" if v == first else v for k, v in index["weight_map"].items()}


def lose(folder, index):
    (folder / next(iter(index["weight_map"].values()))).unlink()


def lose_tokenizer(folder):
    for file in folder.glob("tok*"):
        file.unlink()


WEIGHT_FAULTS = {
    "cut off": (cut, "model.safetensors is damaged or cut off"),
    "empty": (lambda folder: (folder / WEIGHTS).write_bytes(b""), "model.safetensors is damaged or cut off"),
    "noise": (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 999), "model.safetensors is damaged or cut off"),
    "missing tensor": (tensors(lambda found: found.pop(NAME)), f"lacks the tensor {NAME} of its config"),
    "unexpected tensor": (tensors(lambda found: found.update(extra=torch.ones(2))), "has the tensor extra that its"),
    "long name": (
        tensors(lambda found: found.update({"x" * 900: torch.ones(2)})),
        f"names a tensor '{'x' * 59}, but a name of at most 200 printable characters",
    ),
    "long names of shards": (
        sharded(lambda folder, index: index["weight_map"].update({NAME: "y" * 900 + ".safetensors"})),
        f"names the file '{'y' * 79}, but a .safetensors file beside it is expected",
    ),
    "shape": (
        tensors(lambda found: found.update({NAME: found[NAME][:1].clone()})),
        "has shape (1, 85), but its config",
    ),
    "dtype": (tensors(lambda found: found.update({NAME: found[NAME].int()})), "is stored as I32, but one of F64"),
    "nan": (tensors(spoil(float("nan"))), f"{NAME} has 3 of 2,720 values that are not finite"),
    "inf": (tensors(spoil(-float("inf"))), f"{NAME} has 3 of 2,720 values that are not finite"),
    "more layers": (config(num_hidden_layers=3), "lacks 1 of the 3 layers of its config"),
    "thousands of layers": (config(num_hidden_layers=4000), "lacks 3998 of the 4000 layers of its config"),
    "larger vocabulary": (config(vocab_size=2**31 - 1), "but its config makes it (2147483647, 32)"),
    "wider": (config(intermediate_size=2**20), "but its config makes it"),
    "untied": (config(tie_word_embeddings=False), "lacks the tensor lm_head.weight"),
    "shard outside": (sharded(outside), "but a .safetensors file beside it is expected"),
    "shard lost": (sharded(lose), "which is missing"),
    "index without map": (sharded(lambda folder, index: index.pop("weight_map")), "lacks weight_map or metadata"),
    "index of numbers": (sharded(lambda folder, index: index.update(weight_map={NAME: 3})), "names the file 3"),
}
OTHER_FAULTS = {
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors"),
    "broken config": (text("config.json", "{"), "config.json is not valid JSON"),
    "empty config": (text("config.json", ""), "config.json is not valid JSON"),
    "config of bytes": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\0"),
        "config.json is not valid JSON",
    ),
    "config is a list": (text("config.json", "[1]"), "holds a JSON list"),
    "deep config": (text("config.json", DEEP), "config.json is nested too deeply"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "vocab_size text": (config(vocab_size="abc"), "vocab_size='abc' must be a whole number"),
    "vocab_size huge": (config(vocab_size=2**40), "vocab_size=1099511627776 must be at most 2147483647"),
    "hidden_size huge": (config(hidden_size=2**40), "hidden_size=1099511627776 must be at most"),
    "layers huge": (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be at most 4096"),
    "window huge": (config(attention_window=2**40), "attention_window=1099511627776 must be at most"),
    "persistent huge": (config(num_persistent_tokens=2**40), "num_persistent_tokens=1099511627776 must be at most"),
    "eos text": (config(eos_token_id="x"), "eos_token_id='x' must be a token id"),
    "dtype unknown": (config(dtype="junk"), "dtype='junk' is unknown"),
    "dtype whole": (config(dtype="int8"), "dtype='int8' is unknown"),
    "tied is text": (config(tie_word_embeddings="no"), "tie_word_embeddings='no' must be True or False"),
    "memory is a list": (config(memory=[1]), "memory=[1] must be a dict"),
    "deep index": (
        lambda folder: (sharded(lambda *_: None)(folder), (folder / INDEX).write_text(DEEP)),
        "index.json is nested too deeply",
    ),
    "broken generation config": (text("generation_config.json", "{"), "generation_config.json is not valid JSON"),
    "deep generation config": (text("generation_config.json", DEEP), "generation_config.json is nested too deeply"),
    "generation config of text": (text("generation_config.json", '{"top_k": "x"}'), "has top_k='x', but a number"),
    "broken tokenizer": (text("tokenizer_config.json", "{"), "tokenizer"),
    "deep tokenizer": (text("tokenizer_config.json", DEEP), "tokenizer"),
    "no tokenizer": (lambda folder: (lose_tokenizer(folder), widen(folder)), "tokenizer"),
}


def widen(folder):
    """A vocabulary that cannot be bytes."""
    wide = MnemosConfig(hidden_size=32, num_hidden_layers=1, layers="lmm", memory_heads=2, vocab_size=300)
    MnemosForCausalLM(wide).save_pretrained(folder)


@pytest.fixture
def damaged(saved, tmp_path):
    def make(damage):
        folder = tmp_path / "damaged"
        shutil.copytree(saved, folder)
        damage(folder)
        return folder

    return make


def refuse(capsys, *arguments) -> str:
    """The one sentence of a command that fails."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) != 0
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    lines = [line for line in printed.err.splitlines() if line.startswith("mnemos: ")]
    assert len(lines) == 1 and printed.err.splitlines()[-1] == lines[0], printed.err
    return lines[0]


@pytest.mark.parametrize("fault", WEIGHT_FAULTS | OTHER_FAULTS)
def test_a_damaged_folder_is_refused_in_one_sentence_by_every_command(fault, damaged, capsys, tmp_path):
    damage, sentence = (WEIGHT_FAULTS | OTHER_FAULTS)[fault]
    folder = damaged(damage)
    (tmp_path / "text.txt").write_text("some words to read " * 9)
    assert sentence in refuse(capsys, "generate", folder, "--max-tokens", 2)
    assert sentence in refuse(
        capsys, "inspect", folder, "--text", tmp_path / "text.txt", "--out", tmp_path / "page.html"
    )
    if fault in ("cut off", "missing tensor", "nan", "deep config"):
        assert sentence in refuse(capsys, "eval", folder, "--suite", "capacity", "--output", tmp_path / "eval.json")


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_damaged_weights_are_refused_by_from_pretrained(fault, damaged):
    damage, sentence = WEIGHT_FAULTS[fault]
    folder = damaged(damage)
    for kind in (MnemosForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError) as raised:
            kind.from_pretrained(folder)
        assert sentence in str(raised.value)


def test_every_whole_folder_still_opens(saved, damaged):
    expected = MnemosForCausalLM.from_pretrained(saved).state_dict()
    shards = damaged(sharded(lambda folder, index: None))
    add_remote_code(shards)
    for model in (
        AutoModelForCausalLM.from_pretrained(shards),
        AutoModelForCausalLM.from_pretrained(shards, trust_remote_code=True),
        MnemosForCausalLM.from_pretrained(None, config=MnemosConfig.from_pretrained(saved), state_dict=expected),
        load(saved)[0],
    ):
        assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())
    model, info = MnemosForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert isinstance(model, MnemosForCausalLM) and not info["missing_keys"]
    assert MnemosForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_body_opens_from_a_language_model_and_a_tied_language_model_from_a_body(saved, damaged, tmp_path):
    body = AutoModel.from_pretrained(saved)
    assert isinstance(body, MnemosModel)
    body.save_pretrained(tmp_path / "body")
    again = MnemosForCausalLM.from_pretrained(tmp_path / "body")
    expected = load_file(saved / WEIGHTS)
    assert all(torch.equal(expected[name], x) for name, x in again.state_dict().items() if name in expected)
    untied = MnemosConfig(hidden_size=32, num_hidden_layers=1, layers="lmm", memory_heads=2, tie_word_embeddings=False)
    MnemosForCausalLM(untied).save_pretrained(tmp_path / "untied")
    AutoModel.from_pretrained(tmp_path / "untied")  # has no place for the head


def test_allow_missing_initialises_what_is_missing_and_leaves_out_what_is_not_known(damaged, capsys):
    folder = damaged(tensors(lambda found: (found.pop(NAME), found.update(extra=torch.ones(2)))))
    for model in (
        MnemosForCausalLM.from_pretrained(folder, allow_missing=True),
        AutoModelForCausalLM.from_pretrained(folder, allow_missing=True),
        load(folder, allow_missing=True)[0],
    ):
        weight = model.state_dict()[NAME]
        assert weight.isfinite().all() and 0 < weight.std() < 1
    assert main(["generate", str(folder), "--max-tokens", "2", "--allow-missing"]) == 0
    refuse(capsys, "generate", folder, "--max-tokens", 2)  # the choice was for that call alone


def test_allow_missing_opens_neither_numbers_that_are_not_finite_nor_other_shapes(damaged):
    folder = damaged(tensors(spoil(float("nan"))))
    with pytest.raises(ValueError, match="not finite"):
        MnemosForCausalLM.from_pretrained(folder, allow_missing=True)
    tensors(lambda found: found.update({NAME: found[NAME][:1].clone()}))(folder)
    with pytest.raises(ValueError, match="but its config makes it"):
        MnemosForCausalLM.from_pretrained(folder, allow_missing=True)


def test_pickled_weights_are_not_opened(damaged):
    folder = damaged(lambda folder: torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin"))
    (folder / WEIGHTS).unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    Trainer(small(folder, "titans-lmm", steps=2, checkpoint={"every": 2, "asynchronous": False})).train()
    return folder / "runs" / "a"


def seal(step):
    """Make the manifest fit the files, as whoever wrote them could."""
    from mnemos.train.checkpoints import MANIFEST, _checksum

    files = sorted(p for p in step.rglob("*") if p.is_file() and p.name != MANIFEST)
    write_json(step / MANIFEST, {str(p.relative_to(step)): [p.stat().st_size, _checksum(p)] for p in files})


def change_tensors(change):
    def damage(step):
        from safetensors import safe_open

        for file in (step / "tensors").glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                header = opened.metadata()
            found = load_file(file)
            change(found, header)
            save_file(found, file, metadata=header)

    return damage


def change_state(change):
    def damage(step):
        state = json.loads((step / "state.json").read_text())
        change(state)
        (step / "state.json").write_text(json.dumps(state))

    return damage


OWN = "model.model.layers.0.feedforward.down.weight"


def forget(found, header):
    del found[OWN]
    info = json.loads(header["DCP_SHARDING_INFO"])
    info.pop(OWN, None)
    header["DCP_SHARDING_INFO"] = json.dumps(info)


def spoil_run(found, header):
    found[OWN][0, 0] = float("nan")


def cut_tensors(step):
    file = next((step / "tensors").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


RUN_FAULTS = {
    "missing tensor": (change_tensors(forget), f"lacks the tensor {OWN} of its config"),
    "nan": (change_tensors(spoil_run), "values that are not finite"),
    "cut off": (cut_tensors, "its tensors cannot be read"),
    "fewer layers": (
        change_state(lambda state: state["model"].update(num_hidden_layers=1)),
        "that its config does not",
    ),
    "huge vocabulary": (change_state(lambda state: state["model"].update(vocab_size=2**31 - 1)), "(2147483647, 32)"),
    "no model": (change_state(lambda state: state.pop("model")), "does not describe a model"),
    "model is a list": (change_state(lambda state: state.update(model=[1])), "does not describe a model"),
    "deep state": (lambda step: (step / "state.json").write_text(DEEP), "state.json is nested too deeply"),
    "broken state": (lambda step: (step / "state.json").write_text("{"), "state.json is not valid JSON"),
}


@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_a_damaged_checkpoint_of_a_run_is_refused_in_one_sentence(fault, trained, tmp_path, capsys):
    damage, sentence = RUN_FAULTS[fault]
    run = tmp_path / "a"
    shutil.copytree(trained, run)
    step = run / "checkpoints" / "step-000002"
    damage(step)
    seal(step)
    with pytest.raises(ValueError) as raised:
        runs.load_model(run)
    assert sentence in str(raised.value)
    assert sentence in refuse(capsys, "generate", run, "--max-tokens", 2)
    assert sentence in refuse(capsys, "export", run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert main(["analyze", str(run), "--generate", "0", "--tokens", "20", "--out", str(tmp_path / "page.html")]) == 0
    assert "Checkpoint step-000002 is damaged" in capsys.readouterr().out


def test_a_checkpoint_that_lacks_a_tensor_opens_with_allow_missing(trained, tmp_path):
    run = tmp_path / "a"
    shutil.copytree(trained, run)
    change_tensors(forget)(run / "checkpoints" / "step-000002")
    seal(run / "checkpoints" / "step-000002")
    model = runs.load_model(run, allow_missing=True)
    assert all(p.isfinite().all() for p in model.parameters())
    assert main(["export", str(run), str(tmp_path / "out"), "--allow-missing"]) == 0
    assert main(["generate", str(tmp_path / "out"), "--max-tokens", "2"]) == 0


CRAFTED = {
    "many labels": config(num_labels=10**7),
    "labels that are a number": config(id2label=5),
    "quantisation that is a number": config(quantization_config=5),
    "eight-bit floats": config(dtype="float8_e4m3fn"),
    "architectures that are a number": config(architectures=5),
    "a watermark": text("generation_config.json", '{"watermarking_config": {"x": 1}}'),
    "tokens to suppress": text("generation_config.json", '{"suppress_tokens": 5}'),
    "a penalty that is a text": text("generation_config.json", '{"penalty_alpha": "x"}'),
    "a billion beams": text("generation_config.json", '{"num_beams": 1000000000}'),
    "a flag that is a number": text("generation_config.json", '{"do_sample": 3}'),
}


@pytest.mark.parametrize("fault", CRAFTED)
def test_fields_that_transformers_trusts_are_checked_before_it_reads_them(fault, damaged):
    with pytest.raises(ValueError) as refused:
        MnemosForCausalLM.from_pretrained(damaged(CRAFTED[fault]))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize("content", ["{}", "[1]", "5", '{"step": {}, "val_loss": 1}', "[" * 5000], ids=lambda x: x[:9])
def test_a_damaged_record_of_the_best_checkpoint_is_passed_over(content, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "best.json").write_text(content)
    assert records.open_run(run).best is None and len(records.list_runs(tmp_path)) == 1
