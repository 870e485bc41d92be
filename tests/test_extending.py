"""Parts that are defined outside the package, used through the real command line with --import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mnemos
from helpers import assert_close
from mnemos.data.modules import import_named
from mnemos.memory import Gates, MemorySpec, NeuralMemory, make_features, reference_scan, scan, step
from mnemos.models import MnemosCache, MnemosForCausalLM, presets

SRC = str(Path(mnemos.__file__).parents[1])
MAIN = "import sys; from mnemos.cli import main; sys.exit(main())"  # what the `mnemos` script holds
SMALL_PARTS = "from mnemos.data import build, sharding; sharding.PART_BYTES, build.MIN_BYTES_FOR_PROCESSES = 300, 0; "
COMMAND = '''
from mnemos.cli import register_command

@register_command("hello")
def hello(name: str, times: int = 1) -> None:
    """Greet somebody.

    Args:
        name: whom to greet.
        times: how often.
    """
    print(f"Hello, {name}! " * times)
'''
SUITE = """
from mnemos.eval import register_suite

@register_suite("vocabulary", "the model's tokens, and the seed", columns=("tokens", "seed"), reads_text=False)
def vocabulary(context, progress):
    return [{"tokens": context.lm.vocab_size, "seed": context.settings.seed}]
"""
READER = """
from mnemos.data import Reader, open_item, register_reader

@register_reader
class Shout(Reader):
    name, suffixes = "shout", (".shout",)

    def records(self, item, rules, report, on_bytes):
        with open_item(item, on_bytes) as file:
            for line in iter(file.readline, b""):
                yield line.decode().upper()
"""
TRACKER = """
from mnemos.train.telemetry import register_tracker

@register_tracker("lines")
class Lines:
    def __init__(self, folder, name, config):
        self.file = open(folder / "numbers.txt", "a")

    def log(self, step, numbers):
        self.file.writelines(f"{step} {key}\\n" for key in numbers)

    def close(self):
        self.file.close()
"""
PARTS = """
import json
from dataclasses import dataclass
import torch
from torch import Tensor, nn
from mnemos.cli import register_command
from mnemos.memory import (
    CommittedRule, FeatureMap, Gates, InnerLoss, NeuralMemory, Structure, TransformedRetention,
    register_features, register_gating, register_loss, register_retention, register_rule, register_structure
)
from mnemos.models import Gate, Mixer, register_block, register_gate
from mnemos.models.cache_forms import CacheForm, attention_form, memory_form
from mnemos.nn import Attention, RowCache
from mnemos.nn.conv import CausalConv1d

@dataclass
class Tail(RowCache):
    inputs: Tensor

@register_block
class Convolution(Mixer):
    name, description = "convolution", "a causal convolution"

    def __init__(self, config):
        super().__init__(config)
        self.conv, self.out = CausalConv1d(config.hidden_size, 4), nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, state, mask, persistent, use_cache):
        seen, tail = (0, None) if state is None else (state["tail"].position, state["tail"].inputs)
        y, tail = self.conv(x, tail, mask)
        count = torch.full(x.shape[:1], x.shape[1]) if mask is None else mask.sum(1)
        return self.out(y), {"tail": Tail(seen + count, tail)} if use_cache else None

    @classmethod
    def cache_forms(cls, config):
        shapes = lambda rows, longest: {"inputs": (rows, 3, config.hidden_size)}
        return {"tail": CacheForm(Tail, shapes, counts_persistent=True)}

@register_block
class Difference(Mixer):
    name, description = "difference", "sliding-window attention minus memory"
    has_memory, has_attention, without_memory = True, True, "convolution"

    def __init__(self, config):
        super().__init__(config)
        self.attention = Attention(window=config.attention_window, **config.attention_options)
        self.memory = NeuralMemory(config.memory_config)

    def forward(self, x, state, mask, persistent, use_cache):
        y, attention = self.attention(x, state and state["attention"], mask, persistent, use_cache)
        m, memory = self.memory(x, state and state["memory"], mask)
        return y - m, {"attention": attention, "memory": memory} if use_cache else None

    @classmethod
    def cache_forms(cls, config):
        return {"attention": attention_form(config, config.attention_window), "memory": memory_form()}

@register_gate
class Softmax(Gate):
    name, description = "softmax", "weights from a softmax per token"

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(config.hidden_size, 2)

    def forward(self, y, m, x):
        attention, memory = self.linear(x).softmax(-1).split(1, -1)
        return attention * y + memory * m

@register_loss
class LogCosh(InnerLoss):
    name, of_difference = "log_cosh", True

    def loss(self, output, value):
        return (output - value).cosh().log().sum(-1)

    def error(self, output, value):
        return (output - value).tanh()

@register_rule
class UnitStep(CommittedRule):
    name = "unit_step"

    def step(self, S, spec):
        return S / (1e-6 + S.square().sum((-2, -1), keepdim=True)).sqrt()

@register_retention
class Soft(TransformedRetention):
    name = "soft"

    def __init__(self, bound: float = 2.0):
        self.bound = bound

    def weights(self, A):
        return self.bound * (A / self.bound).tanh()

@register_gating
class PerHead(nn.Module):
    name = "per_head"

    def __init__(self, config):
        super().__init__()
        self.rate = nn.Parameter(torch.zeros(config.head_count))

    def forward(self, x):
        return Gates(lr=0.1 * self.rate.sigmoid().expand(*x.shape[:2], -1))

@register_structure
class Highway(Structure):
    name, residual = "highway", True

    def shapes(self):
        return [(self.dim_in, 6), (6, 6), (6, self.dim_out)]

    def forward(self, x, fast):
        hidden = torch.tanh(fast(0, x))
        return fast(2, hidden + torch.sigmoid(fast(1, hidden)) * hidden)

@register_features
class Waves(FeatureMap):
    name = "waves"

    @classmethod
    def lifted_dim(cls, key_dim, degree, feature_dim):
        return 2 * key_dim

    def build(self):
        self.frequency = nn.Parameter(torch.ones(self.heads, self.dim_in))

    def forward(self, x):
        return torch.cat([(x * self.frequency).cos(), (x * self.frequency).sin()], -1)

@register_command("logits")
def logits(models: tuple[str, ...]) -> None:
    from mnemos.eval.loading import load
    for folder in models:
        print(json.dumps(load(folder)[0](torch.arange(7)[None]).logits[0, -1].tolist()))
"""
CHOICES = {
    "loss": {"objective": "log_cosh"},
    "rule": {"rule": "unit_step", "commit_every": 4},
    "structure": {"structure": "highway"},
    "features": {"features": "waves"},
    "retention": {"retention": "soft(bound=1.5)", "commit_every": 2},
    "all four": {
        "objective": "log_cosh",
        "rule": "unit_step",
        "commit_every": 2,
        "structure": "highway",
        "features": "waves",
    },
}
LAYERS = {name: choices | ({"momentum": False} if "retention" in choices else {}) for name, choices in CHOICES.items()}
LAYERS |= {"gating": {"gating": "per_head"}}
MODELS = {name: {f"memory_{key}": value for key, value in choices.items()} for name, choices in LAYERS.items()} | {
    "block": {"layers": ["convolution", "swa"], "num_hidden_layers": 2},
    "block with memory": {"layers": ["difference", "mac", "convolution"], "num_hidden_layers": 3},
    "block in place of memory": {"layers": ["difference", "mag"], "num_hidden_layers": 2, "memory_layers": [1]},
    "gate": {"gate_mode": "softmax"},
    "block and gate": {"layers": ["mag", "difference"], "num_hidden_layers": 2, "gate_mode": "softmax"},
}
BLOCK = """
from mnemos.models import Mixer, register_block

@register_block
class Other(Mixer):
    name = "other"
"""
GATE = """
from mnemos.models import Gate, register_gate

@register_gate
class Other(Gate):
    name = "other"
"""
EXACT = 1e-10
TRAIN = ("--recipe", "debug", "--steps", "2", "--watch.no-display", "--watch.log-every", "1", "--name", "a")


@pytest.fixture
def mnemos_in(tmp_path):
    """Runs the command in a folder of its own; path: one more folder on Python's path."""
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    folder = tmp_path / "here"
    folder.mkdir()

    def run(*arguments: str, path: Path | None = None, before: str = "") -> subprocess.CompletedProcess:
        script.write_text(before + MAIN)
        paths = os.pathsep.join(map(str, filter(None, [SRC, path])))
        environment = os.environ | {
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "MNEMOS_CACHE": str(tmp_path / "cache"),
        }
        environment.pop("PYTHONSAFEPATH", None)
        return subprocess.run(
            [sys.executable, str(script), *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    MnemosForCausalLM(presets.config("titans-lmm", hidden_size=32, num_hidden_layers=1)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder with the module my_parts, whose parts are registered while the tests of this file run."""
    from mnemos.cli import COMMANDS
    from mnemos.memory.config import GATINGS
    from mnemos.memory.features import FEATURES
    from mnemos.memory.losses import LOSSES
    from mnemos.memory.networks import STRUCTURES
    from mnemos.memory.retention import RETENTIONS
    from mnemos.memory.rules import RULES
    from mnemos.models.gate import GATES
    from mnemos.models.mixer import BLOCKS

    folder = tmp_path_factory.mktemp("library")
    (folder / "my_parts.py").write_text(PARTS)
    registries: tuple[dict, ...] = (COMMANDS, FEATURES, LOSSES, STRUCTURES, RULES, RETENTIONS, GATINGS, BLOCKS, GATES)
    before = [(registry, dict(registry)) for registry in registries]
    import_named(str(folder / "my_parts.py"))
    yield folder
    del sys.modules["my_parts"]
    for registry, content in before:
        registry.clear()
        registry.update(content)


@pytest.fixture(scope="module")
def trained(library, tmp_path_factory):
    """A model for each of MODELS, trained for three steps and saved: its folder, and its logits of seven tokens."""
    found = {}
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "attention_window": 8}
    size |= {"segment_length": 8, "memory_chunk_size": 4, "memory_heads": 2}
    for name, choices in MODELS.items():
        torch.manual_seed(0)
        model = MnemosForCausalLM(presets.config("titans-mag", **size | choices))
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
        tokens, losses = torch.arange(23).repeat(2, 1), []
        for _ in range(3):
            losses.append(model(tokens, labels=tokens).loss)
            losses[-1].backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
            optimiser.step()
            optimiser.zero_grad()
        assert losses[-1] < losses[0]
        folder = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
        model.eval().save_pretrained(folder)
        found[name] = (model, folder, model(torch.arange(7)[None]).logits[0, -1].tolist())
    return found


def test_a_command_of_ones_own_runs_has_help_and_is_listed(mnemos_in):
    (mnemos_in.folder / "parts.py").write_text(COMMAND)
    done = mnemos_in("hello", "--name", "Ada", "--times", "2", "--import", "./parts.py")
    assert (done.stdout, done.returncode) == ("Hello, Ada! Hello, Ada! \n", 0), done.stderr
    assert "whom to greet" in mnemos_in("--import", "./parts.py", "hello", "--help").stdout
    assert "Greet somebody." in mnemos_in("--import=./parts.py", "--help").stdout
    done = mnemos_in("hello", "--nme", "Ada", "--import", "./parts.py")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    done = mnemos_in("hello", "--name", "Ada")
    assert done.returncode == 2 and done.stderr.startswith("mnemos: command 'hello' is unknown; choose one of ablate,")


def test_a_suite_of_ones_own_is_measured_and_shown(mnemos_in, model, tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "my_suites.py").write_text(SUITE)
    words = ("eval", str(model), "--suite", "vocabulary", "--seed", "7", "--output", str(tmp_path / "found.json"))
    done = mnemos_in(*words, "--import", "my_suites", path=tmp_path / "library")
    assert done.returncode == 0, done.stderr
    assert "vocabulary" in done.stdout and "256" in done.stdout
    assert json.loads((tmp_path / "found.json").read_text())["suites"]["vocabulary"]["rows"] == [
        {"tokens": 256, "seed": 7}
    ]
    assert "the model&#x27;s tokens, and the seed" in (tmp_path / "found.html").read_text()
    done = mnemos_in(*words, path=tmp_path / "library")
    assert done.returncode == 2 and "suite 'vocabulary' is unknown; choose one of perplexity" in done.stderr


@pytest.mark.parametrize("before", ["", SMALL_PARTS], ids=["one process", "several processes"])
@pytest.mark.parametrize("by", ["name", "path"])
def test_a_reader_of_ones_own_reads_also_in_processes_that_tokenise(mnemos_in, tmp_path, before, by):
    place = tmp_path / "library" if by == "name" else mnemos_in.folder
    place.mkdir(exist_ok=True)
    (place / "my_readers.py").write_text(READER)
    module, path = ("my_readers", place) if by == "name" else ("./my_readers.py", None)
    (mnemos_in.folder / "notes").mkdir()
    for name in "abc":
        (mnemos_in.folder / "notes" / f"{name}.shout").write_text("so it goes, on and on\n" * 20)
    words = ("data", "show", "notes", "--seq-len", "16", "--batch-size", "2", "--val-fraction", "0", "--workers", "2")
    done = mnemos_in(*words, "--import", module, path=path, before=before)
    assert done.returncode == 0, done.stderr
    assert "SO IT GOES" in done.stdout and "60" in done.stdout
    assert len(list((tmp_path / "cache" / "shards").glob("*/*.bin"))) == (3 if before else 1)
    done = mnemos_in(*words)
    assert done.returncode == 2 and "folder notes holds no .txt, .md, .json, .jsonl or .parquet file" in done.stderr


def test_shards_are_made_anew_for_another_version_of_a_reader(mnemos_in, tmp_path):
    (mnemos_in.folder / "a.shout").write_text("so it goes, on and on\n" * 20)
    for version in (1, 1, 2):
        (mnemos_in.folder / "parts.py").write_text(f"{READER}\n    version = {version}\n")
        done = mnemos_in("data", "build", "a.shout", "--seq-len", "16", "--import", "./parts.py")
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "cache" / "shards").glob("*/index.json"))) == 2


def test_a_tracker_of_ones_own_gets_the_numbers_of_a_trainer(mnemos_in):
    (mnemos_in.folder / "parts.py").write_text(
        TRACKER
        + """
from mnemos.cli import register_command

@register_command("track")
def track() -> None:
    import dataclasses
    from mnemos.cli.train import read_arguments
    from mnemos.train import Trainer
    config, _ = read_arguments({words!r})
    config.watch = dataclasses.replace(config.watch, trackers=("lines",))
    Trainer(config).train()
""".replace("{words!r}", repr(list(TRAIN)))
    )
    done = mnemos_in("track", "--import", "./parts.py")
    assert done.returncode == 0, done.stderr
    assert "2 train/loss" in (mnemos_in.folder / "runs" / "a" / "numbers.txt").read_text().splitlines()


def test_a_tracker_of_ones_own_is_used_by_the_command_and_its_run_opens_again(mnemos_in):
    (mnemos_in.folder / "parts.py").write_text(TRACKER)
    done = mnemos_in("train", *TRAIN, "--track", "lines", "--import", "./parts.py")
    assert done.returncode == 0, done.stderr
    numbers = mnemos_in.folder / "runs" / "a" / "numbers.txt"
    assert "2 train/loss" in numbers.read_text().splitlines()
    assert json.loads(mnemos_in("runs", "--json").stdout)["step"] == 2
    done = mnemos_in("train", *TRAIN, "--track", "lins", "--import", "./parts.py")
    assert done.returncode == 2 and "tracker 'lins' is unknown; did you mean lines?" in done.stderr
    resume = ("train", "--resume", "runs/a", "--steps", "4")
    done = mnemos_in(*resume)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("mnemos: tracker 'lines' is unknown; choose one of tensorboard, wandb, trackio, or")
    assert done.stderr.endswith("name the module that registers it: --import MODULE\n")
    assert "3 train/loss" not in numbers.read_text().splitlines()
    done = mnemos_in(*resume, "--import", "./parts.py")
    assert done.returncode == 0, done.stderr
    assert numbers.read_text().splitlines().count("4 train/loss") == 1
    assert json.loads(mnemos_in("runs", "--json").stdout)["step"] == 4


def test_a_trainer_refuses_an_unknown_tracker_before_it_reads_data(tmp_path):
    from mnemos.train import TrainConfig, Trainer, WatchConfig

    config = TrainConfig(folder=str(tmp_path / "runs"), watch=WatchConfig(trackers=("wanddb",)))
    with pytest.raises(ValueError, match="tracker 'wanddb' is unknown; did you mean wandb"):
        Trainer(config)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_tracker_is_refused_when_a_config_is_read(tmp_path):
    from mnemos.train import TrainConfig, WatchConfig
    from mnemos.train.records import list_runs

    path = tmp_path / "runs" / "a" / "config.yaml"
    path.parent.mkdir(parents=True)
    TrainConfig(watch=WatchConfig(trackers=("wanddb",))).save(path)
    with pytest.raises(ValueError, match=r"tracker 'wanddb' is unknown; did you mean wandb.*--import MODULE"):
        TrainConfig.load(path)
    assert [run.config.watch.trackers for run in list_runs(tmp_path / "runs")] == [("wanddb",)]


UNUSABLE = [
    (COMMAND.replace('"hello"', '"eval"'), "command 'eval' is registered already: choose another name"),
    (COMMAND.replace('"hello"', '"-x"'), "the name of a command must be one word that does not begin with -"),
    (SUITE.replace('"vocabulary"', '"needle"'), "suite 'needle' is registered already: choose another name"),
    (READER.replace('"shout"', '"json"'), "reader 'json' is registered already: choose another name"),
    (READER.replace('".shout"', '".md"'), "reader 'shout': files that end in .md are those of reader 'text'"),
    (READER.replace('".shout"', '"shout"'), "reader 'shout': suffix 'shout' must be in lower case"),
    (TRACKER.replace('"lines"', '"wandb"'), "tracker 'wandb' is registered already: choose another name"),
    (BLOCK.replace('"other"', '"mag"'), "block 'mag' is registered already: choose another name"),
    (
        BLOCK.replace('name = "other"', "pass"),
        "<class 'parts.Other'> cannot be registered: a block is a subclass of",
    ),
    (BLOCK + "    has_memory = True", "block 'other' has a memory: set without_memory to the block in its place"),
    (GATE.replace('"other"', '"convex"'), "gate 'convex' is registered already: choose another name"),
    (GATE.replace("(Gate)", ""), "<class 'parts.Other'> cannot be registered: a gate is a subclass of Gate with"),
    ("import nosuchmodule", "./parts.py needs nosuchmodule, which is not installed"),
    ("def f(:", "./parts.py is not Python: invalid syntax"),
]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(content, sentence, marks=() if i in (0, 4, 8, 13) else pytest.mark.slow)  # a process each
        for i, (content, sentence) in enumerate(UNUSABLE)
    ],
)
def test_a_module_that_cannot_be_used_is_one_sentence(mnemos_in, content, sentence):
    (mnemos_in.folder / "parts.py").write_text(content)
    done = mnemos_in("--version", "--import", "./parts.py")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"mnemos: --import ./parts.py: {sentence}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "there is no module nowhere on Python's path; name a file by its path: ./nowhere.py"),
        ("./nowhere.py", "./nowhere.py is not a Python file"),
        ("no-where", "'no-where' is not the name of a module; name a file by its path: ./parts.py"),
        ("", "'' is not the name of a module; name a file by its path: ./parts.py"),
        ("json.nowhere", "there is no module json.nowhere on Python's path"),
    ],
)
def test_a_module_that_is_not_there_is_one_sentence(mnemos_in, name, sentence):
    done = mnemos_in("--version", "--import", name)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"mnemos: --import {name}: {sentence}") and len(done.stderr.splitlines()) == 1


def test_a_file_of_the_working_folder_is_imported_by_its_path_alone(mnemos_in):
    marker = "open('ran', 'w').close()"
    (mnemos_in.folder / "parts.py").write_text(marker)
    (mnemos_in.folder / "json.py").write_text(marker)
    for name, sentence in {
        "parts": "there is no module parts on Python's path; name a file by its path: ./parts.py",
        "./json.py": "./json.py cannot be imported: there is another module json; rename the file",
    }.items():
        done = mnemos_in("--version", "--import", name)
        assert done.returncode == 2 and sentence in done.stderr
        assert not (mnemos_in.folder / "ran").exists()
    assert mnemos_in("--version", "--import", "./parts.py", "--import", "./parts.py").returncode == 0
    assert (mnemos_in.folder / "ran").exists()


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("length", [5, 23])
def test_scan_and_step_are_the_reference_for_parts_of_ones_own(library, name, window, length):
    """In outputs, final state, and gradients of every input, the initial weights and the feature map."""
    spec = MemorySpec(
        **{"key_dim": 4, "value_dim": 4, "expansion": 2, "window": window, "chunk_size": 8} | CHOICES[name]
    )
    B, H, draw = 2, 3, torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=draw, dtype=torch.float64)).requires_grad_()

    def uniform(low: float, high: float) -> torch.Tensor:
        drawn = torch.rand(B, length, H, generator=draw, dtype=torch.float64)
        return (low + (high - low) * drawn).requires_grad_()

    q, k = normal(B, length, H, 4, scale=0.5), normal(B, length, H, 4, scale=0.5)
    v, W0 = normal(B, length, H, 4), [normal(H, *shape, scale=shape[0] ** -0.5) for shape in spec.shapes]
    lr, momentum, retain, gate = uniform(0, 0.1), uniform(0.5, 0.95), uniform(0.8, 1), uniform(0.2, 1)
    features = make_features(spec, H)
    momentum = momentum if spec.update_rule.momentum_gate else None
    leaves = [x for x in (q, k, v, lr, momentum, retain, gate, *W0) if x is not None]
    leaves += [] if features is None else list(features.double().parameters())

    def result(run) -> list[torch.Tensor]:
        y, state = run(spec.initial_state(W0, batch=B))
        parts = [y, *(x for x in state.tensors().values() if x.is_floating_point())]
        weights = torch.Generator().manual_seed(1)
        total = sum((x * torch.randn(x.shape, generator=weights, dtype=x.dtype)).sum() for x in parts)
        return [*parts, *torch.autograd.grad(total, leaves, retain_graph=True)]

    def whole(function):
        return lambda state: function(q, k, v, Gates(lr, momentum, retain, gate), state, spec, features)

    def by_step(state):
        found = []
        for t in range(length):
            each = [None if x is None else x[:, t : t + 1] for x in (q, k, v, lr, momentum, retain, gate)]
            y, state = step(*each[:3], Gates(*each[3:]), state, spec, features)
            found.append(y)
        return torch.cat(found, 1), state

    expected = result(whole(reference_scan))
    for how in (whole(scan), by_step):
        for i, (x, y) in enumerate(zip(result(how), expected, strict=True)):
            assert_close(x, y, EXACT, f"{name}, tensor {i}")


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_parts_of_ones_own_decodes_as_it_reads(library, name):
    torch.manual_seed(0)
    layer = NeuralMemory(dim=16, heads=2, chunk_size=4, **LAYERS[name]).double()
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    whole, _ = layer(x)
    first, state = layer(x[:, :9])
    rest = [first]
    for t in range(9, 23):
        y, state = layer(x[:, t : t + 1], state)
        rest.append(y)
    assert_close(torch.cat(rest, 1), whole, EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_parts_of_ones_own_generates_with_a_cache(trained, name):
    model = trained[name][0]
    prompt = torch.arange(7)[None]
    cached, anew = (model.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=on) for on in (True, False))
    assert cached.shape == (1, 19) and torch.equal(cached, anew)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_parts_of_ones_own_reads_rows_of_any_length_in_a_batch(trained, name):
    """Prompts padded on the left, then token by token with the cache: each row as in one forward of it alone."""
    model = MnemosForCausalLM.from_pretrained(trained[name][1]).double()
    lengths, T, new = (3, 11, 7), 11, 13
    ids = torch.randint(0, 256, (3, T + new), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(T) >= T - torch.tensor(lengths).unsqueeze(1)
    with torch.no_grad():
        output = model(ids[:, :T], attention_mask=mask.long(), use_cache=True)
        found = [output.logits[:, -1:]]
        for t in range(T, T + new):
            output = model(ids[:, t : t + 1], past_key_values=output.past_key_values, use_cache=True)
            found.append(output.logits)
        for row, length in enumerate(lengths):
            alone = model(ids[row : row + 1, T - length :], use_cache=False).logits
            assert_close(torch.cat(found, 1)[row], alone[0, length - 1 :], 1e-9)


@pytest.mark.parametrize("name", ["block", "block with memory", "gate"])
@torch.no_grad()
def test_a_cache_of_parts_of_ones_own_is_saved_and_opened_again(trained, name, tmp_path):
    model = trained[name][0]
    cache = model.state(torch.arange(20).view(2, 10))
    cache.save(tmp_path / "cache")
    opened = MnemosCache.load(tmp_path / "cache", model.config)
    new = torch.tensor([[5], [6]])
    assert torch.equal(model(new, past_key_values=opened).logits, model(new, past_key_values=cache).logits)
    assert opened.fork(2).batch == 4 and not opened.is_kv_cache


@torch.no_grad()
def test_a_cache_that_could_not_be_opened_again_is_not_saved(trained, tmp_path, monkeypatch):
    from mnemos.models.mixer import BLOCKS

    monkeypatch.delattr(BLOCKS["convolution"], "cache_forms")
    with pytest.raises(ValueError, match="block 'convolution' has no cache_forms, so its caches cannot be saved"):
        trained["block"][0].state(torch.arange(5)[None]).save(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_layer_left_out_of_memory_layers_becomes_the_block_that_its_class_names(trained):
    config = trained["block in place of memory"][0].config
    assert config.blocks == ["convolution", "mag"] and config.has_memory


def test_models_with_parts_of_ones_own_open_in_a_new_process_with_import(mnemos_in, library, trained):
    folders = [str(folder) for _, folder, _ in trained.values()]
    for module, path in (("my_parts", library), (str(library / "my_parts.py"), None)):
        done = mnemos_in("logits", "--models", *folders, "--import", module, path=path)
        assert done.returncode == 0, done.stderr
        for line, (_, _, logits) in zip(done.stdout.splitlines(), trained.values(), strict=True):
            assert json.loads(line) == pytest.approx(logits, rel=1e-5, abs=1e-6)
    for folder in folders:
        assert json.loads(Path(folder, "config.json").read_text())["requires_modules"] == ["my_parts"]


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("structure", "structure='highway'"),
        pytest.param("block", "layers='convolution'", marks=pytest.mark.slow),  # two processes each
        pytest.param("gate", "gate_mode='softmax'", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_needs_a_module_names_it(mnemos_in, library, trained, name, choice):
    """And imports nothing by itself, although Python would find the module."""
    folder = str(trained[name][1])
    done = mnemos_in("generate", folder, "--max-tokens", "2", path=library)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"{choice} is not registered" in done.stderr
    assert "use --import my_parts, or in Python: import my_parts" in done.stderr
    done = mnemos_in("generate", folder, "--max-tokens", "2", "--import", "my_parts", path=library)
    assert done.returncode == 0, done.stderr


def test_a_resumed_run_that_needs_a_module_names_it(mnemos_in, library):
    (mnemos_in.folder / "text.txt").write_text("so it goes, on and on\n" * 200)
    small = (
        "hidden_size=16",
        "num_hidden_layers=1",
        "memory_heads=2",
        "memory_chunk_size=4",
        "memory_structure=highway",
    )
    words = ("--preset", "titans-lmm", "--data", "text.txt", "--model.set", *small)
    done = mnemos_in("train", *TRAIN, *words, "--import", "my_parts", path=library)
    assert done.returncode == 0, done.stderr
    resume = ("train", "--resume", "runs/a", "--steps", "4")
    done = mnemos_in(*resume, path=library)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "structure='highway' is not registered" in done.stderr and "--import my_parts" in done.stderr
    done = mnemos_in(*resume, "--import", "my_parts", path=library)
    assert done.returncode == 0, done.stderr


def test_a_model_of_parts_of_the_package_needs_no_module(model):
    assert "requires_modules" not in json.loads((model / "config.json").read_text())
