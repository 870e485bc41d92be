"""Mistakes in Python: each is a ValueError of one sentence that names the argument and says what to do."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mnemos.ablate import AblationSettings
from mnemos.data import DataConfig, open_tokenizer
from mnemos.data.tasks import Background, mad, needle
from mnemos.eval import EvalSettings, Evaluator, LanguageModel, run_suites
from mnemos.memory import Gates, MemorySpec, NeuralMemory, NeuralMemoryConfig, scan
from mnemos.memory.validation import NotFiniteError
from mnemos.models import MnemosConfig, MnemosForCausalLM, presets
from mnemos.train import TrainConfig, recipe
from mnemos.train.distributed import open_device

IDS = torch.tensor([[1, 2, 3]])
DEEP = 3000


@pytest.fixture(scope="module")
def model():
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "layers": "lmm", "memory_heads": 2, "vocab_size": 256}
    return MnemosForCausalLM(MnemosConfig(**fields)).eval()


def refused(call, *words: str) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text
    return text


# ---- the model


@pytest.mark.parametrize("name", ["forward", "state", "generate", "decode"])
@pytest.mark.parametrize("bad", [256, -1, 2**31])
def test_a_token_id_out_of_range_is_named_with_its_place(model, name, bad):
    ids = torch.tensor([[1, 2], [3, bad]])
    calls = {
        "forward": lambda: model(ids),
        "state": lambda: model.state(ids),
        "generate": lambda: model.generate(ids, max_new_tokens=2),
        "decode": lambda: model(ids[:, 1:], past_key_values=model.state(ids[:, :1])),
    }
    place = "batch row 1, position 0" if name == "decode" else "batch row 1, position 1"
    refused(calls[name], f"token {bad} in {place}", "0 .. 255", "tokenizer")


@pytest.mark.parametrize("ids", [IDS.float(), IDS.bool(), IDS.short(), IDS.to(torch.uint8)], ids=lambda x: str(x.dtype))
def test_ids_of_another_type_are_refused_with_the_conversion(model, ids):
    for call in (model, model.state, model.generate):
        refused(lambda call=call: call(ids), str(ids.dtype), ".long()")


@pytest.mark.parametrize("ids", ["hello", [[1, 2, 3]], [1, 2, 3], ("a",), 5])
def test_what_is_no_tensor_is_refused_as_ids(model, ids):
    for call in (model, model.state, model.generate):
        refused(lambda call=call: call(ids), f"input_ids is a {type(ids).__name__}", "torch.tensor(")


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_no_token_at_all_is_refused(model, shape):
    ids = torch.zeros(shape, dtype=torch.long)
    for call in (model, model.state, lambda ids: model.generate(ids, max_new_tokens=2)):
        refused(lambda call=call: call(ids), "input_ids", "one")


@pytest.mark.parametrize(
    "embeds, words",
    [
        (torch.zeros(1, 2, 32, dtype=torch.long), "torch.int64"),
        (torch.zeros(1, 2, 32, dtype=torch.float64), "torch.float64"),
        (torch.zeros(1, 2, 31), "(1, 2, 31)"),
        ("hello", "is a str"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(model, embeds, words):
    refused(lambda: model(inputs_embeds=embeds), "inputs_embeds", words)


@pytest.mark.parametrize(
    "labels, words",
    [
        ([[1, 2, 3]], "labels are a list"),
        (IDS.float(), "labels have type torch.float32"),
        (torch.tensor([[1, 2, 300]]), "token 300 in batch row 0, position 2 of labels"),
        (torch.tensor([[1, -5, 3]]), "token -5 in batch row 0, position 1 of labels"),
    ],
)
def test_labels_that_are_no_tokens_are_refused(model, labels, words):
    refused(lambda: model(IDS, labels=labels), words)
    assert model(IDS, labels=torch.tensor([[1, -100, 3]])).loss.isfinite()


def test_masks_and_positions_that_are_lists_are_refused(model):
    refused(lambda: model(IDS, attention_mask=[[1, 1, 1]]), "attention_mask is a list")
    refused(lambda: model(IDS, position_ids=[[0, 1, 2]]), "position_ids is a list")


def test_ids_on_the_meta_device_are_refused_by_a_model_that_is_elsewhere(model):
    refused(lambda: model(IDS.to("meta")), "meta device")


@pytest.mark.parametrize("preset", ["titans-mac", "titans-mag", "qk-mag", "transformer"])
def test_a_model_on_the_meta_device_gives_shapes_or_one_sentence(preset):
    with torch.device("meta"):
        model = MnemosForCausalLM(presets.config(preset, num_hidden_layers=1))
    ids = torch.zeros(1, 70, dtype=torch.long, device="meta")
    if model.config.has_memory and preset != "qk-mag":
        refused(lambda: model(ids), "meta device", "to_empty")
    else:
        assert model(ids).logits.shape == (1, 70, 256)


# ---- the layer


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "fields", [{}, {"rule": "muon", "window": 4, "gate": "token*decay"}, {"retain": "fixed"}], ids=str
)
def test_a_number_that_is_not_finite_is_blamed_on_x_and_its_row(value, fields):
    mem, x = NeuralMemory(dim=32, heads=2, **fields), torch.randn(3, 10, 32)
    x[1, 3, 5] = value
    for call in (mem, mem.write, lambda x: mem(x, trace=True), torch.no_grad()(mem)):
        text = refused(lambda call=call: call(x), f"x is {value} in batch row 1, position 3", "mask")
        assert "gates" not in text
    refused(lambda: torch.no_grad()(mem)(x[:, 3:4]), f"x is {value} in batch row 1, position 0")
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[1, 3] = False
    assert mem(x, mask=mask)[0].isfinite().all()


def test_every_row_that_is_not_finite_is_named():
    mem, x = NeuralMemory(dim=32, heads=2), torch.randn(4, 5, 32)
    x[1], x[3] = math.nan, math.nan
    refused(lambda: mem(x), "row 1, position 0 (rows 1, 3)")


def test_a_parameter_that_is_not_finite_is_named_where_x_is_fine():
    mem, x = NeuralMemory(dim=32, heads=2), torch.randn(2, 5, 32)
    torch.nn.init.constant_(mem.gating.linear.weight, math.nan)
    refused(lambda: mem(x), "gates.lr", "gating.linear.weight is not")


def test_gates_that_are_not_finite_are_named_by_row_and_count_as_a_bad_step():
    spec = MemorySpec(key_dim=4, value_dim=4, structure="linear")
    q, k, v = torch.randn(3, 2, 6, 1, 4)
    state, lr = spec.initial_state([torch.zeros(1, 4, 4)], batch=2), torch.full((2, 6, 1), 0.1)
    lr[1, 4] = math.inf
    with pytest.raises(ValueError, match=r"gates\.lr .* first in batch row 1, position 4") as caught:
        scan(q, k, v, Gates(lr=lr), state, spec)
    assert isinstance(caught.value, NotFiniteError)
    lr[1, 4] = -1.0
    with pytest.raises(ValueError, match="first in batch row 1, position 4") as caught:
        scan(q, k, v, Gates(lr=lr), state, spec)
    assert not isinstance(caught.value, NotFiniteError)


def test_a_row_of_nan_in_a_batch_counts_as_a_bad_step_in_training():
    mem, x = NeuralMemory(dim=32, heads=2), torch.full((1, 2, 32), math.nan)
    with pytest.raises(ValueError) as caught:
        mem(x)
    assert isinstance(caught.value, NotFiniteError)


def test_document_bounds_may_be_a_list_and_are_checked():
    mem, x = NeuralMemory(dim=32, heads=2, rule="muon"), torch.randn(1, 10, 32)
    expected, state = mem(x, cu_seqlens=torch.tensor([0, 4, 10]))
    for bounds in ([0, 4, 10], (0, 4, 10), torch.tensor([0, 4, 10]).numpy()):
        assert torch.equal(mem(x, cu_seqlens=bounds)[0], expected)
        assert mem.write(x, cu_seqlens=bounds).batch == state.batch == 2
    for bounds in ([0, 4, 11], [0, 4.5, 10], "ab", ["0", "10"], 10, [[0, 10]], [0]):
        refused(lambda bounds=bounds: mem(x, cu_seqlens=bounds), "cu_seqlens")
    refused(lambda: mem(x, mask=[[True] * 10]), "mask is a list")


def test_a_config_refuses_what_its_layer_refuses():
    refused(lambda: NeuralMemoryConfig(dim=32, anchor="token"), "anchor='token' goes with structure='linear'")
    refused(lambda: NeuralMemoryConfig(dim=32, rule="gd", commit_every=4), "commit_every")
    refused(lambda: NeuralMemory(32, haeds=2), "no field haeds; did you mean heads?")
    for text in ("nope", "[]", "{}", "[" * DEEP, '{"dim": 32, "haeds": 2}'):
        refused(lambda text=text: NeuralMemoryConfig.from_json(text), "NeuralMemoryConfig")


@pytest.mark.parametrize(
    "fields",
    [{}, {"w0_branch": False}, {"rule": "muon", "window": 4, "gate": "token*decay"}, {"features": "exp"}],
    ids=str,
)
def test_a_fully_masked_batch_gives_every_parameter_a_gradient_of_zero(fields):
    mem, x = NeuralMemory(dim=32, heads=2, **fields), torch.randn(2, 10, 32)
    mem(x, mask=torch.zeros(2, 10, dtype=torch.bool))[0].sum().backward()
    missing = [name for name, p in mem.named_parameters() if p.grad is None]
    assert not missing
    assert not mem.gating.linear.weight.grad.any()


# ---- names


def test_the_nearest_name_is_suggested():
    for call, near in (
        (lambda: presets.config("titan-mag"), "titans-mag"),
        (lambda: presets.config("titans-mag", "Nanoo"), "nano"),
        (lambda: recipe(TrainConfig(), "quik"), "quick"),
        (lambda: needle("passkye", 500, 0.5, open_tokenizer("bytes")), "passkey"),
        (lambda: mad("selectve-copying", 1), "selective-copying"),
        (lambda: AblationSettings(task="mqra").check(), "mqar"),
    ):
        refused(call, f"did you mean {near}?")


def test_a_suite_and_its_tasks_are_suggested(model):
    refused(lambda: Evaluator(model).run_full_evaluation(["needel"]), "did you mean needle?")
    found = Evaluator(model).run_full_evaluation(["mad"], mad=("selectve-copying",))
    assert "did you mean selective-copying?" in found["suites"]["mad"]["error"]


# ---- texts, tokenizers and files


def test_an_evaluator_takes_a_text_itself(model, tmp_path):
    text = "It was the best of times, it was the worst of times. " * 40
    found = Evaluator(model).run_full_evaluation(["perplexity"], text=text, output=tmp_path / "eval.json")
    (tmp_path / "text.txt").write_text(text)
    same = Evaluator(model).run_full_evaluation(["perplexity"], text=str(tmp_path / "text.txt"))
    rows, others = found["suites"]["perplexity"]["rows"], same["suites"]["perplexity"]["rows"]
    assert [r["loss"] for r in rows] == [r["loss"] for r in others]
    assert len((tmp_path / "eval.json").read_text()) < 20_000 and text not in (tmp_path / "eval.json").read_text()
    short = Evaluator(model).run_full_evaluation(["perplexity"], text="One line.\nAnd another.")
    assert "rows" in short["suites"]["perplexity"]


def test_a_name_that_is_neither_file_nor_text_is_refused(model):
    for text in ("nope.txt", "x" * 300, "my notes.txt"):
        found = run_suites(model, open_tokenizer("bytes"), ["perplexity"], EvalSettings(text=text))
        assert "neither a file nor a folder" in found["suites"]["perplexity"]["error"]


def test_a_tokenizer_that_is_a_string_is_refused_with_the_call_that_opens_it(model):
    for call in (
        lambda: Evaluator(model, "bytes"),
        lambda: LanguageModel(model, "bytes"),
        lambda: Background("A text. Another.", "bytes"),
    ):
        refused(call, "tokenizer is the string 'bytes'", "open_tokenizer('bytes')")
    refused(lambda: Evaluator("runs/x"), "model is a str", "from_pretrained")
    for name in (None, 5, "", "x" * 300, "/nope"):
        refused(lambda name=name: open_tokenizer(name), "tokenizer")


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        dict(id=0, content="<eos>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    ],
    "model": {"type": "WordLevel", "vocab": {"<eos>": 0, "a": 1}, "unk_token": "<eos>"},
}


@pytest.mark.parametrize(
    "part, words",
    [
        (
            {"model": {"type": "WordLevel", "vocab": {"<eos>": 0, "a": 2**31}, "unk_token": "<eos>"}},
            "2147483648 for 'a'",
        ),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "is damaged"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "is damaged"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}}, "is damaged"),
    ],
    ids=["id 2**31", "panic in encoding", "panic in opening", "panic in decoding"],
)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_damaged_tokenizer_is_one_sentence_and_no_panic(tmp_path, capfd, part, words, kind):
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(TOKENIZER | part))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(lambda: open_tokenizer(str(file if kind == "file" else tmp_path)), words)
    assert "panicked" not in capfd.readouterr().err


def test_a_tokenizer_that_cannot_encode_a_text_says_so(tmp_path):
    pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(TOKENIZER | {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}}))
    refused(lambda: open_tokenizer(str(file)).encode("xyz"), "cannot encode a text")


def test_files_nested_too_deeply_are_refused(tmp_path):
    for name, text in (("a.yaml", "a: " + "[" * DEEP + "]" * DEEP), ("b.yaml", "a: [1"), ("c.yaml", "a: 2020-99-99")):
        (tmp_path / name).write_text(text)
        refused(lambda name=name: TrainConfig.load(tmp_path / name), name, "not a readable config")
    config = TrainConfig()
    for value in ("[" * DEEP, "[1"):
        config.model.set = (f"attention_window={value}",)
        refused(config.model.overrides, "model.set=")


def test_numbers_and_devices_that_cannot_be_are_refused():
    refused(lambda: TrainConfig(tokens="inf").token_budget(1), "tokens='inf'")
    refused(lambda: TrainConfig(seed=2**63), "seed=")
    refused(lambda: presets.config("titans-mag", memory=5), "memory=5")
    refused(lambda: open_device("meta"), "device='meta'")
    with pytest.raises(ValueError, match="sources must be"):
        DataConfig(sources="text.txt").validate()  # ty: ignore[invalid-argument-type]
