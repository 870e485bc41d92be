"""Files of an older version open, and give the numbers of that version.

compat_files/make.py wrote them with commit be9471b, and describes them. Settings have their old names there: skip, learned_start,
read_start, start_scale and optim.start_lr. A newer name for a setting may cause a DeprecationWarning, and nothing else.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import assert_close_rms
from mnemos.cli import main
from mnemos.memory import Gates, MemorySpec, MemoryState, NeuralMemory, NeuralMemoryConfig, make_features, scan, step
from mnemos.models import MnemosCache, MnemosForCausalLM
from mnemos.train import TrainConfig, load_model
from small import losses

FILES = Path(__file__).parent / "compat_files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
TOLERANCE = 1e-5  # relative RMS, float32

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
every_state = pytest.mark.parametrize("name", ["gd", "muon", "exp", "token"])
every_layer = pytest.mark.parametrize("name", ["skip", "no_start", "read_start"])
every_model = pytest.mark.parametrize("name", ["mag", "mac"])
every_way = pytest.mark.parametrize("backend", ["auto", "torch"])


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A copy of the old run in the working folder, beside its text and its config file."""
    shutil.copytree(FILES / "run", tmp_path / "run")
    for name in ("words.txt", "train.yaml"):
        shutil.copy(FILES / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def continuation(name: str, state: MemoryState):
    """Tensors of continuation.safetensors by name, the gates and the feature map."""
    x = load_file(FILES / "states" / name / "continuation.safetensors")
    gates = Gates(**{key: x[key] for key in ("lr", "momentum", "retain", "gate", "decay", "lag") if key in x})
    features = make_features(state.spec, state.heads)
    if features is not None:
        learned = {key.removeprefix("features."): value for key, value in x.items() if key.startswith("features.")}
        features.load_state_dict(learned)
    return x, gates, features


@every_state
@every_way
@torch.no_grad()
def test_a_saved_memory_state_resumes_with_the_same_outputs_and_final_weights(name, backend):
    state = MemoryState.load(FILES / "states" / name / "state.safetensors")
    x, gates, features = continuation(name, state)
    y, final = scan(x["q"], x["k"], x["v"], gates, state, state.spec, features, backend=backend)
    assert_close_rms(y, x["y"], TOLERANCE, "outputs")
    assert final.position.tolist() == [20, 20]
    for i, weights in enumerate(final.weights):
        assert_close_rms(weights, x[f"final.{i}"], TOLERANCE, f"weights of map {i}")


@every_state
@torch.no_grad()
def test_a_saved_memory_state_resumes_token_by_token(name):
    state = MemoryState.load(FILES / "states" / name / "state.safetensors")
    spec = state.spec
    x, gates, features = continuation(name, state)
    outputs = []
    for t in range(x["y"].shape[1]):
        token = (x[key][:, t : t + 1] for key in ("q", "k", "v"))
        y, state = step(*token, gates.map(lambda gate, t=t: gate[:, t : t + 1]), state, spec, features)
        outputs.append(y)
    assert_close_rms(torch.cat(outputs, 1), x["y"], TOLERANCE)


@every_state
def test_a_spec_in_json_is_that_of_the_saved_state(name):
    spec = MemorySpec.from_json(json.loads((FILES / "specs.json").read_text())[name])
    assert MemoryState.load(FILES / "states" / name / "state.safetensors", spec).spec == spec
    assert MemorySpec.from_json(spec.to_json()) == spec


@every_layer
@every_way
@torch.no_grad()
def test_a_layer_made_from_json_has_the_same_outputs_and_resumes_from_its_state(name, backend):
    folder = FILES / "layers" / name
    fields = json.loads((folder / "config.json").read_text()) | {"backend": backend}
    layer = NeuralMemory(NeuralMemoryConfig.from_json(json.dumps(fields))).eval()
    layer.load_state_dict(load_file(folder / "weights.safetensors"))
    x, y = (load_file(folder / "expected.safetensors")[key] for key in "xy")
    assert_close_rms(layer(x)[0], y, TOLERANCE, "all tokens at once")
    state = MemoryState.load(folder / "state.safetensors")
    read = int(state.position[0])
    assert_close_rms(layer(x[:, read:], state=state)[0], y[:, read:], TOLERANCE, "from the saved state")


@every_layer
def test_a_layer_config_in_json_survives_another_round_trip(name):
    config = NeuralMemoryConfig.from_json((FILES / "layers" / name / "config.json").read_text())
    assert NeuralMemoryConfig.from_json(config.to_json()) == config


@every_model
@torch.no_grad()
def test_an_exported_model_has_the_same_logits_also_after_saving_it_again(name, tmp_path):
    folder = FILES / "models" / name
    expected = load_file(folder / "expected.safetensors")
    model = MnemosForCausalLM.from_pretrained(folder / "export").eval()
    logits = model(expected["ids"]).logits
    assert_close_rms(logits, expected["logits"], TOLERANCE)
    model.save_pretrained(tmp_path / "again")
    again = MnemosForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(expected["ids"]).logits, logits)


@every_model
@pytest.mark.parametrize("one_by_one", [False, True])
@torch.no_grad()
def test_a_saved_cache_resumes_with_the_same_logits(name, one_by_one):
    folder = FILES / "models" / name
    expected = load_file(folder / "expected.safetensors")
    model = MnemosForCausalLM.from_pretrained(folder / "export").eval()
    cache = MnemosCache.load(folder / "cache.safetensors", model.config)
    read = cache.get_seq_length()
    logits = []
    for ids in expected["ids"][:, read:].split(1 if one_by_one else 5, dim=1):
        output = model(ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    assert_close_rms(torch.cat(logits, 1), expected["logits"][:, read:], TOLERANCE)


def test_an_old_run_resumes_with_the_same_losses(run):
    assert main(["train", "--resume", "run", "--steps", "6"]) == 0
    expected = {int(step): loss for step, loss in EXPECTED["losses"].items()}
    assert losses(run) == pytest.approx(expected, rel=TOLERANCE)


def test_an_old_config_file_trains_with_the_same_losses(run):
    """Also pins the random initial weights: with the same seed, a version draws those of the version before.

    A preset is a name for the newest choice: its memories forgot towards 0 then."""
    shutil.rmtree(run)
    settings = Path("train.yaml").read_text()
    Path("train.yaml").write_text(settings.replace("  set:\n", "  set:\n  - memory_retention=zero\n"))
    assert 30.0 in TrainConfig.load("train.yaml").to_dict()["optim"].values()  # optim.start_lr
    assert main(["train", "--config", "train.yaml"]) == 0
    assert losses(run) == pytest.approx({step: EXPECTED["losses"][str(step)] for step in (1, 2)}, rel=TOLERANCE)


def test_generate_opens_an_old_run(run, capsys):
    command = ["generate", "run", "--prompt", "the memory", "--max-tokens", "4", "--temperature", "0", "--no-stream"]
    assert not main(command)
    assert capsys.readouterr().out == EXPECTED["generated"]
    with torch.no_grad():
        logits = load_model(run)(torch.tensor([list(b"the memory")])).logits[0, -1]
    assert_close_rms(logits, torch.tensor(EXPECTED["logits"]), TOLERANCE)


def test_eval_opens_an_old_run(run):
    assert not main(["eval", "run", "--suite", "perplexity", "--text", "words.txt", "--output", "eval.json"])
    rows = json.loads(Path("eval.json").read_text())["suites"]["perplexity"]["rows"]
    found = {row["memory"]: row["perplexity"] for row in rows if row["what"] == "all tokens"}
    assert found == pytest.approx(EXPECTED["perplexity"], rel=TOLERANCE)


def test_an_old_name_overrides_the_choice_of_a_preset():
    """The preset has `residual: True` under its new name: the override is no second field."""
    from mnemos.models import presets

    with pytest.warns(DeprecationWarning, match="memory_skip is called memory_residual now"):
        assert presets.config("ttt-mlp", memory_skip=False).memory_config.residual is False
    with pytest.warns(DeprecationWarning, match="skip is called residual now"):
        assert presets.config("ttt-mlp", memory={"skip": False}).memory_config.residual is False
