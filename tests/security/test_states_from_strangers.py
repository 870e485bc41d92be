"""States and caches from files: what does not fit is refused in one sentence, before any kernel sees it."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mnemos.memory import MemoryState, NeuralMemory
from mnemos.models import MnemosCache, MnemosConfig, MnemosForCausalLM

BLOCKS = (
    *("lmm", "mag", "mal", "mac", "qk", "swa", "attention", "mac + conv", "swa + conv", "attention + conv"),
    *("lmm towards the start", "mac towards the start"),
)


def model_of(name: str) -> MnemosForCausalLM:
    torch.manual_seed(0)
    layers, _, conv = name.partition(" + ")
    choices = dict(hidden_size=32, num_hidden_layers=2, vocab_size=64, num_attention_heads=4, num_persistent_tokens=2)
    layers, _, retention = layers.partition(" towards the ")
    more: dict = {} if layers in ("qk", "swa", "attention") else {"memory": {"heads": 4, "chunk_size": 4}}
    if retention:
        more["memory"]["retention"] = retention
    more["attention_conv_width"] = 4 if conv else 0
    config = MnemosConfig(layers=layers, attention_window=8, segment_length=4, **choices, **more)
    return MnemosForCausalLM(config).eval()


class File:
    """A saved cache taken apart, and a way to write it back changed."""

    def __init__(self, path, model: MnemosForCausalLM):
        self.path, self.model = path, model
        self.cache = model.state(torch.randint(0, 64, (2, 11)))
        self.cache.save(path)
        with safe_open(path, "pt") as file:
            self.header = file.metadata()
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def load(self, tensors: dict | None = None, settings: dict | None = None, **header) -> MnemosCache:
        states = json.loads(self.header["states"])
        for place in states:
            states[place] |= settings or {}
        changed = self.header | {"states": json.dumps(states)} | header
        save_file(self.tensors | (tensors or {}), self.path, changed)
        return MnemosCache.load(self.path, self.model.config)

    def named(self, ending: str) -> dict[str, torch.Tensor]:
        return {name: x for name, x in self.tensors.items() if name.endswith(ending)}


@pytest.fixture(params=BLOCKS)
def saved(request, tmp_path) -> File:
    return File(tmp_path / "cache.safetensors", model_of(request.param))


@torch.no_grad()
def test_what_was_saved_continues_identically(saved):
    ids, model = torch.randint(0, 64, (2, 7)), saved.model
    warm, loaded = saved.cache, saved.load()
    for column in ids.split([1, 5, 1], 1):
        kept, read = model(column, past_key_values=warm), model(column, past_key_values=loaded)
        assert torch.equal(kept.logits, read.logits)
        warm, loaded = kept.past_key_values, read.past_key_values


@pytest.mark.parametrize("position", [-1, -60, 2**63 - 1, 2**62])
def test_a_position_that_no_sequence_has_is_refused(saved, position):
    wrong = {name: torch.full_like(x, position) for name, x in saved.named(".position").items()}
    with pytest.raises(ValueError, match="position"):
        saved.load(wrong)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64, torch.uint8])
def test_positions_of_another_type_are_refused(saved, dtype):
    with pytest.raises(ValueError, match=r"position is .* of torch\."):
        saved.load({name: x.to(dtype) for name, x in saved.named(".position").items()})


def test_layers_at_different_positions_are_refused(tmp_path):
    saved = File(tmp_path / "a", model_of("mag"))
    with pytest.raises(ValueError, match="different positions"):
        saved.load({"1.attention.position": saved.tensors["1.attention.position"] + 1})


@pytest.mark.parametrize(
    "settings", [{"persistent": -60}, {"persistent": 2**40}, {"window": 1}, {"spare": 7}, {"a": 1}]
)
@pytest.mark.parametrize("layers", ["mag", "swa", "attention"])
def test_settings_that_are_not_the_models_are_refused(layers, settings, tmp_path):
    saved = File(tmp_path / "a", model_of(layers))
    with pytest.raises(ValueError, match="AttentionCache has"):
        saved.load(settings=settings)


@pytest.mark.parametrize("layers", ["lmm", "mag", "mal", "mac"])
def test_a_memory_of_other_heads_is_refused(layers, tmp_path):
    saved = File(tmp_path / "a", model_of(layers))
    fewer = {
        name: x[:, :1].contiguous() for name, x in saved.tensors.items() if ".weights." in name or "anchor" in name
    }
    with pytest.raises(ValueError, match="1 heads, but the model's memory has 4"):
        saved.load(fewer)


def test_every_tensor_must_be_there_finite_and_of_its_shape(saved):
    for name, x in list(saved.tensors.items()):
        if not name.endswith(".position"):
            if x.numel():
                with pytest.raises(ValueError, match="not finite"):
                    saved.load({name: torch.full_like(x, float("nan"))})
            with pytest.raises(ValueError, match=r"floating-point|number types|numbers of type"):
                saved.load({name: x.to(torch.int64)})
        with pytest.raises(ValueError, match=r"fit its own header|holds no|position"):
            saved.load({name: x.unsqueeze(0).contiguous()})
        kept = saved.tensors.pop(name)
        with pytest.raises(ValueError, match=r"fit its own header|holds no|position"):
            saved.load()
        saved.tensors[name] = kept


def test_a_tensor_that_belongs_to_no_layer_is_refused(saved):
    for name in ("7.memory.weights.0", "x", "0.memory", "-1.memory.weights.0", "0.other.key"):
        with pytest.raises(ValueError, match=r"belongs to no layer|fit its own header"):
            saved.load({name: torch.zeros(2)})


@pytest.mark.parametrize(
    "header",
    [
        {"length": "-1"},
        {"length": "1e400"},
        {"length": '"x"'},
        {"length": "true"},
        {"length": "null"},
        {"states": "[]"},
        {"states": "{}"},
        {"states": '{"0.memory": 3}'},
        {"states": "[" * 100_000},
        {"config": "{}"},
        {"config": '{"num_hidden_layers": 1000000000}'},
        {"config": '{"num_hidden_layers": "two"}'},
        {"config": "3"},
        {"config": '{"a":' * 3000 + "1" + "}" * 3000},
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_broken_header_is_refused_in_one_sentence(header, tmp_path):
    saved = File(tmp_path / "a", model_of("mag"))
    with pytest.raises(ValueError) as refused:
        saved.load(**header)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_a_memory_state_of_a_file_is_finite_and_of_the_layer_that_reads_it(tmp_path):
    memory = NeuralMemory(dim=32, heads=4, chunk_size=4, window=3)
    memory.write(torch.randn(1, 7, 32)).save(tmp_path / "a")
    with safe_open(tmp_path / "a", "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, x in tensors.items():
        if x.is_floating_point():
            save_file(tensors | {name: torch.full_like(x, float("inf"))}, tmp_path / "b", header)
            with pytest.raises(ValueError, match="not finite"):
                MemoryState.load(tmp_path / "b")
    save_file(tensors | {"window_gate": tensors["window_gate"] + 2}, tmp_path / "b", header)
    with pytest.raises(ValueError, match="window gates"):
        MemoryState.load(tmp_path / "b")
    save_file(tensors | {"position": torch.tensor([2**63 - 1])}, tmp_path / "b", header)
    with pytest.raises(ValueError, match="beyond"):
        MemoryState.load(tmp_path / "b")


def test_choices_of_a_projection_from_a_file_are_of_their_types():
    """Found by the fuzzer: a window that is a string, and an eps beyond 64 bits, ended in tracebacks."""
    for choices in ({"window": "3"}, {"window": 2**40}, {"decay": "0.9"}, {"persistent": 1.5}, {"gate_hidden": -1}):
        with pytest.raises(ValueError, match=next(iter(choices))):
            MnemosConfig(hidden_size=8, num_attention_heads=2, layers="qk", qk_projection=choices)
    with pytest.raises(ValueError, match="rms_norm_eps"):
        MnemosConfig(hidden_size=8, num_attention_heads=2, layers="qk", rms_norm_eps=10**20)


def test_a_cache_of_a_projection_has_one_type_of_numbers(tmp_path):
    """Found by the fuzzer: a Gram matrix of float64 beside a norm of float32 ended in torch's own error."""
    model = MnemosForCausalLM(
        MnemosConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, layers="qk")
    )
    cache = model.state(torch.tensor([[1, 2, 3]]))
    state = cache.layers[0]["memory"]
    state.gram = state.gram.double()
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="mixes number types"):
        MnemosCache.load(tmp_path / "cache", model.config)


def test_a_size_beyond_int64_is_one_sentence(tmp_path):
    """Found by the fuzzer: a tensor without elements may claim any other size, and torch raised a TypeError of many lines."""
    header = json.dumps({"weights.0": {"dtype": "F32", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "state"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="is not a readable memory state") as refused:
        MemoryState.load(path)
    assert "\n" not in str(refused.value)


def test_a_negative_threshold_in_a_window_is_refused(tmp_path):
    """Thresholds of a Huber loss stand behind the values of the window; a file may hold any number there."""
    layer = NeuralMemory(8, heads=2, objective="huber", window=3, momentum=False)
    state = layer.write(torch.randn(1, 5, 8)).detach()
    state.save(tmp_path / "good")
    assert MemoryState.load(tmp_path / "good").window_value.shape == (1, 2, 2, 5)
    state.window_value[..., -1] = -0.5
    state.save(tmp_path / "bad")
    with pytest.raises(ValueError, match="has negative thresholds in window_value"):
        MemoryState.load(tmp_path / "bad")
