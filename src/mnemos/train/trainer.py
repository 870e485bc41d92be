"""`Trainer`: one run from start to end, or from wherever it was stopped."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..models import MnemosForCausalLM, presets
from .carry import Carried
from .checkpoints import Checkpoints, Contents, random_state, set_random_state
from .config import TrainConfig
from .control import MemoryDropout, set_chunk_size
from .display import Display, Silent
from .distributed import Spread, open_world
from .guard import Guard
from .optimisers import Optimisers
from .probes import contribution, look_inside, needle
from .runs import model_tensors, new_name
from .schedules import chunk_size, lr_factor, polarisation
from .step import Stepper, StepResult
from .telemetry import Metrics, Speed, flops_per_token, open_tracker

CONTRIBUTION_BATCHES = 4


class TrainingFailed(RuntimeError):
    """A run that cannot go on; the message says why and what to do."""


@dataclass
class Result:
    """How a run ended. stopped: by a signal, before its last step. saved: whether its last checkpoint was written."""

    path: Path
    step: int
    loss: float
    val_loss: float | None
    stopped: bool
    saved: bool


class Trainer:
    """Trains the model of a config; `runs/<name>/` holds everything that comes of it.

    data: what `mnemos.data.open_data` returns, or anything with its train, validation, tokenizer and vocab_size.
    resume: go on from the newest whole checkpoint of the run `config.name`.

    >>> import tempfile
    >>> from mnemos.train import TrainConfig, Trainer, recipe
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     config = recipe(TrainConfig(folder=folder, name="a", steps=1), "debug")
    ...     config.steps, config.watch.probe_every, config.data.cache_dir = 2, 0, folder
    ...     result = Trainer(config).train()
    >>> result.step, result.saved
    (2, True)
    """

    def __init__(self, config: TrainConfig, data: Any = None, resume: bool = False, display: bool = False):
        self.config, self.resume = config, resume
        self.world = world = open_world(config.device)
        if config.data.batch_size % world.size:
            raise ValueError(
                f"data.batch_size={config.data.batch_size} must be a multiple of the {world.size} processes"
            )
        if data is None:
            from ..data import open_data

            data = open_data(config.data, seed=config.seed, rank=world.rank, world_size=world.size)
        self.data = data
        torch.manual_seed(config.seed)
        model = MnemosForCausalLM(self._model_config()).to(world.device).train()
        self.parameters_count = sum(p.numel() for p in model.parameters())
        self.total = config.total_steps(self.parameters_count)
        self.path = self._folder()
        self.model = model
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        MemoryDropout(model, config.loss.memory_dropout)
        flops = flops_per_token(model, config.data.seq_len)
        if config.compile:
            for block in model.model.layers:
                block.compile()
        self.spread = Spread(model, world, config.parallel)
        self.parameters = list(model.parameters())
        self.optimisers = Optimisers(model, config.optim)
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()} if config.optim.ema else {}
        self.carried, self.guard = Carried(), Guard()
        self.stepper = Stepper(self.spread, config, iter(self.data.train), self.carried)
        self.display = (
            Display(self.path.name, self.total, config.watch.display) if display and world.first else Silent()
        )
        self.checkpoints = Checkpoints(
            self.path / "checkpoints", world, config.checkpoint.keep_last, config.checkpoint.asynchronous, self.say
        )
        self.speed = Speed(world.device, flops, config.dtype)
        self.step, self.tokens, self.val_loss = 0, 0, None
        self.best, self._new_best = math.inf, False
        self._stop: str | None = None
        torch.manual_seed(config.seed + world.rank)  # weights are alike everywhere, what is dropped is not
        self.metrics: Metrics | None = None

    def _model_config(self):
        config, data = self.config, self.data
        overrides = config.model.overrides()
        vocabulary = overrides.setdefault("vocab_size", data.vocab_size)
        if vocabulary < data.vocab_size:
            raise ValueError(f"vocab_size={vocabulary} is too small for the tokenizer's {data.vocab_size} tokens")
        eos = getattr(data.tokenizer, "eos_token_id", None)
        return presets.config(config.model.preset, config.model.size, **{"eos_token_id": eos} | overrides)

    def _folder(self) -> Path:
        """The run's folder, made and described by the first process."""
        config, folder = self.config, Path(self.config.folder)
        name = config.name
        if self.world.first:
            if name is None:
                name = new_name(folder, f"{config.model.preset}-{config.model.size}")
            path = folder / name
            taken = (path / "checkpoints").is_dir() and any((path / "checkpoints").glob("step-*"))
            if taken and not self.resume:
                raise ValueError(f"{path} holds a run already: go on with --resume {path}, or choose another name")
            path.mkdir(parents=True, exist_ok=True)
            if not self.resume:
                for file in ("metrics.jsonl", "samples.jsonl", "best.json"):
                    (path / file).unlink(missing_ok=True)
        name = config.name = self.world.tell(name)
        path = folder / name
        if self.world.first:
            config.save(path / "config.yaml")
            (path / "tokenizer").mkdir(exist_ok=True)
            self.data.tokenizer.save(path / "tokenizer")
        return path

    def say(self, sentence: str) -> None:
        """One sentence for the user, and for the record."""
        self.display.say(sentence)
        if self.metrics is not None:
            self.metrics.log(self.step, "event", message=sentence)

    # ---- the run

    def train(self) -> Result:
        """Run to the last step, or until SIGTERM or Ctrl-C, which save first."""
        began = time.perf_counter()
        from_step = self._restore() if self.resume else None
        if self.world.first:
            trackers = [
                open_tracker(kind, self.path, self.path.name, self.config.to_dict())
                for kind in self.config.watch.trackers
            ]
            self.metrics = Metrics(self.path, trackers, from_step)
        if from_step is None:
            self._describe()
        self.display.start(self.step)
        self.speed.start()
        result: StepResult | None = None
        try:
            with self._signals():
                while self.step < self.total:
                    result = self._one_step()
                    if self.step == (from_step or 0) + 1:
                        self._log("event", message="first step", seconds=time.perf_counter() - began)
                    if result.stop:
                        break
                return self._end(result)
        finally:
            self.checkpoints.finish()
            self.display.close()
            if self.metrics is not None:
                self.metrics.close()

    def _one_step(self) -> StepResult:
        config, step = self.config, self.step
        size = chunk_size(config.schedule, step, self.total)
        if size is not None and self.model.config.has_memory and self.model.config.memory_config.chunk_size != size:
            set_chunk_size(self.model, size)
            self.carried.drop()
            self.say(f"step {step}: the memory's chunk is now {size}")
        self.optimisers.set_factor(lr_factor(config.schedule, step, self.total) * self.guard.lr_factor)
        strength = polarisation(config.loss, step, self.total)
        result = self.stepper.run(self.parameters, strength, self._stop is not None)
        self.speed.tokens += result.tokens
        self.speed.waited += result.waited
        self.tokens += result.tokens
        verdict = self.guard.see(result.loss if math.isfinite(result.grad_norm) else math.nan, config.checkpoint)
        if verdict == "good":
            self.optimisers.step()
            for name, p in self.model.named_parameters() if self.average else ():
                self.average[name].lerp_(p.detach().to(self.average[name]), 1 - config.optim.ema)
        self.optimisers.zero_grad()
        if verdict == "skip":
            self.carried.drop()
            self.say(
                f"step {step}: the loss or its gradient is not finite; the step is skipped ({self.guard.bad_steps} so far)"
            )
        elif verdict == "back":
            self._go_back()
            return result
        self.step += 1
        if self.step % config.watch.log_every == 0 or self.step == self.total:
            self._log_step(result, strength)
        self._look_around()
        if (self._due(config.checkpoint.every) or self._new_best) and self.guard.healthy and self.step < self.total:
            self.save()
        return result

    def _end(self, result: StepResult | None) -> Result:
        stopped = self.step < self.total
        if not stopped and self.config.watch.validate_every and not self._due(self.config.watch.validate_every):
            self.validate()
        saved = self.save(wait=True)
        if not stopped:
            self.sample()
        if stopped:
            then = f"its checkpoint is written; go on with: mnemos train --resume {self.path}"
            self.say(
                f"{self._stop or 'another process'} stopped the run at step {self.step}; "
                + (then if saved else "no checkpoint was written")
            )
        loss = result.loss if result is not None else math.nan
        return Result(self.path, self.step, loss, self.val_loss, stopped, saved)

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _look_around(self) -> None:
        watch = self.config.watch
        paused = time.perf_counter()
        if self._due(watch.validate_every):
            self.validate()
        if self._due(watch.probe_every):
            self.probe()
        if self._due(watch.sample_every) and self.step < self.total:
            self.sample()
        self.speed.paused += time.perf_counter() - paused

    # ---- what is measured

    def _log(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.log(self.step, kind, **values)

    def _describe(self) -> None:
        report = str(getattr(self.data, "report", "") or "")
        model = f"{self.config.model.preset} {self.config.model.size}"
        self.say(
            f"{model}: {self.parameters_count:,} parameters, {self.total:,} steps of {self.config.tokens_per_step:,} tokens, "
            f"{self.spread.strategy if self.world.size > 1 else 'one process'} on {self.world.device}, into {self.path}"
        )
        if report:
            self.say(report)

    def _log_step(self, result: StepResult, strength: float) -> None:
        numbers: dict[str, Any] = {
            "loss": result.loss,
            "perplexity": math.exp(min(20.0, result.loss)) if math.isfinite(result.loss) else math.nan,
            "lr": self.optimisers.lr,
            "grad_norm": result.grad_norm,
            "tokens": self.tokens,
            "smoothed_loss": self.guard.smoothed,
            "bad_steps": self.guard.bad_steps,
            "rollbacks": self.guard.rollbacks,
        }
        if strength:
            numbers |= {"polarisation": result.polarisation, "polarisation_lambda": strength}
        numbers |= self.speed.look()
        numbers["seconds_left"] = self.display.time_left(self.step)
        self._log("train", **numbers)
        self.display.update(self.step, numbers)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            with torch.no_grad(), self.stepper.autocast():
                yield
        finally:
            self.spread.settle()
            self.model.train()

    def validate(self) -> float:
        """Loss on the held-out text, and what the memory does there. Saves the best model so far."""
        with self._evaluating():
            loss, count = self.stepper.evaluate(self.data.validation)
            if not count:
                return math.nan
            batches = [self.stepper.to_device(b) for b, _ in zip(self.data.validation, range(CONTRIBUTION_BATCHES))]
            layers = look_inside(self.model, self.spread.call, batches[0])
            memory = contribution(self.model, self.spread.call, batches, self.world)
            average = self._average_loss()
        per_token = getattr(self.data.tokenizer, "bytes_per_token", None) or 1.0
        numbers: dict[str, Any] = {
            "val_loss": loss,
            "perplexity": math.exp(min(20.0, loss)) if math.isfinite(loss) else math.nan,
            "bits_per_byte": loss / math.log(2) / per_token,
            "tokens": self.tokens,
            "tokens_validated": count,
            "layers": layers,
        }
        if memory is not None:
            numbers["memory"] = memory
        if average is not None:
            numbers["val_loss_average"] = average
        if self.guard.smoothed is not None:
            numbers["gap"] = math.exp(min(20.0, loss)) / math.exp(min(20.0, self.guard.smoothed))
        self.val_loss = loss
        self._log("validate", **numbers)
        mixes = [layer["gate"]["mean"] for layer in layers.values() if "gate" in layer]
        shown = {"val_loss": loss, "bits_per_byte": numbers["bits_per_byte"], "best": min(self.best, loss)}
        shown |= {"gate_mean": sum(mixes) / len(mixes)} if mixes else {}
        shown |= {"memory_share": memory["share"]} if memory else {}
        self.display.update(self.step, shown)
        if loss < self.best:
            self.best, self._new_best = loss, True
        return loss

    def _average_loss(self) -> float | None:
        """Validation loss of the averaged weights, which change places with the live ones for as long as it takes."""
        if not self.average:
            return None
        self.spread.settle()
        live = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        try:
            for name, p in self.model.named_parameters():
                p.data.copy_(self.average[name])
            return self.stepper.evaluate(self.data.validation)[0]
        finally:
            self.spread.settle()
            for name, p in self.model.named_parameters():
                p.data.copy_(live[name])

    def probe(self) -> dict[str, float]:
        """A needle in a haystack of held-out text."""
        first = next(iter(self.data.validation), None)
        if first is None:
            return {}
        haystack = self.world.tell(first["input_ids"].flatten())
        with self._evaluating():
            found = needle(
                self.spread.call, self.data.tokenizer, haystack, self.config.watch.probe_length, self.world.device
            )
        self._log("probe", **found)
        self.display.update(self.step, {"niah_accuracy": found["accuracy"]})
        return found

    def sample(self) -> str:
        """A continuation of the prompt; the random numbers of training are left alone."""
        watch, tokenizer = self.config.watch, self.data.tokenizer
        if not watch.sample_tokens:
            return ""
        ids = torch.tensor([tokenizer.encode(watch.prompt)], device=self.world.device)
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._evaluating():
            torch.manual_seed(self.config.seed)
            made = self.model.generate(
                ids, max_new_tokens=watch.sample_tokens, do_sample=True, temperature=0.8, top_k=50, pad_token_id=0
            )
        text = tokenizer.decode(made[0].tolist())
        if self.world.first:
            with open(self.path / "samples.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, "text": text}) + "\n")
        self.display.say(f"sample at step {self.step}: {text!r}")
        return text

    # ---- what is kept

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything a checkpoint writes and reads into: weights, optimiser, average, by name and live."""
        named = model_tensors(self.model, "model")
        named |= {f"optim.{name}": x for name, x in self.optimisers.tensors().items()}
        return named | {f"average.{name}": x for name, x in self.average.items()}

    def save(self, wait: bool = False) -> bool:
        """Write a checkpoint now; the best one, where validation has just found these weights to be that."""
        best, self._new_best = self.best if self._new_best else None, False
        state = {
            "tokens": self.tokens,
            "guard": self.guard.state(),
            "val_loss": self.val_loss,
            "best": self.best if math.isfinite(self.best) else None,
            "data": self.data.train.state_dict(),
            "world_size": self.world.size,
            "config": self.config.to_dict(),
            "model": json.loads(self.model.config.to_json_string(use_diff=False)),
        }
        files: dict[str, Callable[[Path], None]] = {}
        if self.carried.cache is not None:
            files[f"carried-{self.world.rank}.safetensors"] = self.carried.save
        contents = Contents(self.step, state, {"random": random_state()}, files)
        return self.checkpoints.save(self.tensors(), contents, best, wait)

    def _restore(self) -> int:
        """Go on from the newest whole checkpoint."""
        self.optimisers.allocate()
        found = self.checkpoints.load(self.tensors)
        if found is None:
            self.say(f"{self.path} has no checkpoint that can be used; starting from the beginning")
            for optimiser in self.optimisers.all:
                optimiser.state.clear()
            return 0
        path, state = found
        self._take(path, state)
        self.guard = Guard(**state["guard"])
        self.data.train.load_state_dict(state["data"])
        own = path / f"rank-{self.world.rank}.json"
        if state["world_size"] == self.world.size and own.exists():
            set_random_state(json.loads(own.read_text())["random"])
        if self.config.data.carry_state:
            self.carried.load(
                path, self.world.rank, self.world.size, state["world_size"], self.model.config, self.world.device
            )
        self.say(f"going on from {path}")
        return self.step

    def _take(self, path: Path, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.val_loss = state["step"], state["tokens"], state["val_loss"]
        self.best = math.inf if state["best"] is None else state["best"]
        memory = state["model"].get("memory") or {}
        size = memory.get("chunk_size")
        if size and self.model.config.has_memory:
            set_chunk_size(self.model, size)

    def _go_back(self) -> None:
        """To the newest checkpoint from before the trouble, with a smaller learning rate and the data that comes next."""
        config, guard = self.config.checkpoint, self.guard
        why = (
            "the loss was not finite"
            if guard.bad_in_a_row
            else f"the smoothed loss rose to {guard.smoothed:.3f} from {guard.lowest:.3f}"
        )
        if guard.rollbacks >= config.rollbacks:
            raise TrainingFailed(
                f"{why} at step {self.step}, after {guard.rollbacks} rollbacks; the best checkpoint is kept: "
                "try a smaller optim.lr, a longer schedule.warmup, or dtype float32"
            )
        self.checkpoints.finish()
        limit = None if guard.lowest is None or not config.spike else guard.lowest + config.spike / 2
        found = self.checkpoints.load(self.tensors, self._last_good(limit))
        if found is None:
            raise TrainingFailed(
                f"{why} at step {self.step}, and there is no checkpoint to go back to: try a smaller optim.lr or a longer schedule.warmup"
            )
        path, state = found
        failed_at, best = self.step, self.best
        self._take(path, state)
        self.best = min(self.best, best)
        guard.went_back(state["guard"], config)
        self.carried.drop()
        self.say(f"step {failed_at}: {why}; back to {path}, learning rate times {guard.lr_factor:.2f} from here")

    def _last_good(self, limit: float | None) -> int | None:
        """The newest checkpoint whose smoothed loss was not on its way up; -1: none."""
        good = -1
        for step in self.world.tell(self.checkpoints.steps()):
            state = json.loads((self.checkpoints.path(step) / "state.json").read_text())
            smoothed = state["guard"]["smoothed"]
            if limit is None or smoothed is None or smoothed <= limit:
                good = step
        return good

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C ask for a stop after this step; a second one does not ask."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number, frame):
            self._stop = signal.Signals(number).name
            signal.signal(number, before[number])

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
