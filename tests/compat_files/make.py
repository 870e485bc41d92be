"""Writes the files of this folder with the code of commit be9471b, the last one with the old names of settings.

    git worktree add --detach OLD be9471b
    PYTHONPATH=OLD/src python tests/compat_files/make.py

tests/test_old_files.py opens them with the current code and compares the numbers. Run this script with no other commit:
the expected numbers are those of be9471b.

    states/NAME    a `MemoryState` after 13 tokens, and inputs and outputs of 7 more
    layers/NAME    a `NeuralMemoryConfig` in JSON, weights, a state after 13 tokens, and inputs and outputs of 7 more
    models/NAME    an exported model, a cache after 11 tokens, and logits of these tokens and of 5 more
    specs.json     every `MemorySpec` of states/, as text
    run/           a run of `mnemos train` after 2 steps of train.yaml on words.txt
    expected.json  losses of run/ after `mnemos train --resume`, and outputs of `mnemos generate` and `mnemos eval`

Shapes: B batch, T tokens, H heads, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mnemos
from mnemos.cli import main as command
from mnemos.memory import Gates, MemorySpec, NeuralMemory, NeuralMemoryConfig, make_features, scan
from mnemos.models import MnemosConfig, MnemosForCausalLM
from mnemos.train import load_model
from mnemos.train.telemetry import read_metrics

COMMIT = "be9471b"
FOLDER = Path(__file__).resolve().parent
BATCH, HEADS, READ, MORE = 2, 2, 13, 7

SPECS = {
    "gd": MemorySpec(4, 4, expansion=2.0, window=3, chunk_size=8, skip=False),
    "muon": MemorySpec(3, 4, expansion=2.0, rule="muon", features="monomials", window=2, chunk_size=8, commit_every=4),
    "exp": MemorySpec(4, 4, expansion=2.0, features="exp", window=2, chunk_size=4, momentum=False),
    "token": MemorySpec(4, 3, structure="linear", anchor="token", window=3, chunk_size=8, decay_first=True),
}
GATES = {
    "gd": ("momentum", "retain", "gate", "decay"),
    "muon": ("momentum", "retain", "gate"),
    "exp": ("retain", "gate", "lag"),
    "token": ("momentum", "retain", "gate"),
}
LAYERS = {
    "skip": NeuralMemoryConfig(8, heads=2, expansion=2.0, chunk_size=8, skip=True, read_start=False, start_scale=0.5),
    "no_start": NeuralMemoryConfig(
        8, heads=2, structure="linear", anchor="token", learned_start=False, window=3, gate="token*decay"
    ),
    "read_start": NeuralMemoryConfig(
        8, heads=2, expansion=2.0, depth=3, chunk_size=8, read_start=True, start_scale=0.02, gate="per-lag", window=2
    ),
}
SHARED = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_persistent_tokens=2,
)
MODELS = {
    "mag": MnemosConfig(
        layers="mag",
        attention_window=6,
        memory_heads=2,
        memory_expansion=1.0,
        memory_chunk_size=4,
        memory_skip=True,
        memory_read_start=False,
        memory_start_scale=0.5,
        **SHARED,
    ),
    "mac": MnemosConfig(
        layers="mac",
        segment_length=4,
        num_longterm_tokens=2,
        memory={"heads": 2, "structure": "linear", "chunk_size": 4, "learned_start": False, "read_start": False},
        **SHARED,
    ),
}


def randomise(module: nn.Module, generator: torch.Generator, scale: float) -> None:
    """Move every parameter off its initial value: none keeps a 0 or 1 that would hide an error."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.detach().contiguous().clone() for name, x in tensors.items()}, path)


def random_inputs(spec: MemorySpec, names: tuple[str, ...], length: int, generator: torch.Generator) -> dict:
    """q, k (B, T, H, key_dim), v (B, T, H, value_dim), and the named gates besides lr."""

    def uniform(*shape: int, low: float, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    shape = (BATCH, length, HEADS)
    q, k = (nn.functional.normalize(torch.randn(*shape, spec.key_dim, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(*shape, spec.value_dim, generator=generator)
    gates = {
        "momentum": uniform(*shape, low=0.5, high=0.9),
        "retain": uniform(*shape, low=0.8),
        "gate": uniform(*shape, low=0.3),
        "decay": uniform(HEADS, low=0.5),
        "lag": uniform(*shape, spec.window, low=0.2),
    }
    lr = uniform(*shape, low=0.02, high=0.1)
    return {"q": q, "k": k, "v": v, "lr": lr, **{name: gates[name] for name in names}}


@torch.no_grad()
def make_states() -> None:
    for seed, (name, spec) in enumerate(SPECS.items()):
        generator = torch.Generator().manual_seed(seed)
        features = make_features(spec, HEADS)
        if features is not None:
            randomise(features, generator, 0.3)
        W0 = [torch.randn(HEADS, *shape, generator=generator) * shape[0] ** -0.5 for shape in spec.shapes]
        state = spec.initial_state(W0, batch=BATCH)
        folder = FOLDER / "states" / name
        folder.mkdir(parents=True)
        for length in (READ, MORE):
            x = random_inputs(spec, GATES[name], length, generator)
            gates = Gates(**{key: x[key] for key in x if key not in ("q", "k", "v")})
            y, state = scan(x["q"], x["k"], x["v"], gates, state, spec, features)
            if length == READ:
                state.save(folder / "state.safetensors")
        weights = {f"final.{i}": w for i, w in enumerate(state.weights)}
        learned = {} if features is None else {f"features.{key}": p for key, p in features.state_dict().items()}
        save(folder / "continuation.safetensors", {**x, "y": y, **weights, **learned})
    texts = {name: spec.to_json() for name, spec in SPECS.items()}
    (FOLDER / "specs.json").write_text(json.dumps(texts, indent=1) + "\n")


@torch.no_grad()
def make_layers() -> None:
    for seed, (name, config) in enumerate(LAYERS.items()):
        generator = torch.Generator().manual_seed(10 + seed)
        torch.manual_seed(seed)
        layer = NeuralMemory(config).eval()
        randomise(layer, generator, 0.2)
        folder = FOLDER / "layers" / name
        save(folder / "weights.safetensors", layer.state_dict())
        (folder / "config.json").write_text(config.to_json() + "\n")
        x = torch.randn(BATCH, READ + MORE, config.dim, generator=generator)  # B T D
        first, state = layer(x[:, :READ])
        state.save(folder / "state.safetensors")
        rest, _ = layer(x[:, READ:], state=state)
        save(folder / "expected.safetensors", {"x": x, "y": torch.cat([first, rest], 1)})


@torch.no_grad()
def make_models() -> None:
    for seed, (name, config) in enumerate(MODELS.items()):
        generator = torch.Generator().manual_seed(20 + seed)
        torch.manual_seed(seed)
        model = MnemosForCausalLM(config).eval()
        randomise(model, generator, 0.2)
        folder = FOLDER / "models" / name
        model.save_pretrained(folder / "export")
        ids = torch.randint(0, config.vocab_size, (BATCH, 11 + 5), generator=generator)  # B T
        output = model(ids[:, :11], use_cache=True)
        output.past_key_values.save(folder / "cache.safetensors")
        rest = model(ids[:, 11:], past_key_values=output.past_key_values)
        logits = torch.cat([output.logits, rest.logits], 1)  # B T V
        save(folder / "expected.safetensors", {"ids": ids, "logits": logits})


def make_run() -> None:
    """Train, resume, generate and evaluate in a temporary folder, so that the files contain relative paths only."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in ("words.txt", "train.yaml"):
            shutil.copy(FOLDER / name, name)
        assert command(["train", "--config", "train.yaml"]) == 0
        shutil.copytree("run", FOLDER / "run", ignore=shutil.ignore_patterns(".lock"))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert not command(GENERATE)
        assert not command(EVALUATE)
        model, prompt = load_model("run"), torch.tensor([list(b"the memory")])  # 1 T
        with torch.no_grad():
            logits = model(prompt).logits[0, -1]  # V
        options = dict(do_sample=False, output_logits=True, return_dict_in_generate=True)
        steps = model.generate(prompt, max_new_tokens=4, **options).logits
        gaps = [float(first - second) for first, second in (step[0].topk(2).values for step in steps)]
        assert min(gaps) > 1e-3, f"rounding could change the generated text: {gaps}"
        rows = json.loads(Path("eval.json").read_text())["suites"]["perplexity"]["rows"]
        assert command(["train", "--resume", "run", "--steps", "6"]) == 0
        expected = {
            "losses": {str(record["step"]): record["loss"] for record in read_metrics("run", "train")},
            "generated": printed.getvalue(),
            "logits": logits.tolist(),
            "perplexity": {row["memory"]: row["perplexity"] for row in rows if row["what"] == "all tokens"},
        }
    (FOLDER / "expected.json").write_text(json.dumps(expected) + "\n")


# commands in the folder that holds run/ and words.txt; tests/test_old_files.py runs the same
GENERATE = ["generate", "run", "--prompt", "the memory", "--max-tokens", "4", "--temperature", "0", "--no-stream"]
EVALUATE = ["eval", "run", "--suite", "perplexity", "--text", "words.txt", "--output", "eval.json"]


def check_commit() -> None:
    source = Path(mnemos.__file__).resolve().parent
    found = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    if not found.startswith(COMMIT):
        raise SystemExit(f"{source} is not commit {COMMIT}: set PYTHONPATH to the src folder of a worktree of it")


if __name__ == "__main__":
    check_commit()
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("states", "layers", "models", "run"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    make_states()
    make_layers()
    make_models()
    make_run()
