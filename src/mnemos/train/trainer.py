"""`Trainer`: one run from its first step to its last, or resumed from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .advice import advice
from .checkpoints import Checkpoints
from .config import TrainConfig
from .display import Display, NoDisplay, slow_first_step
from .distributed import Spread, World, open_world
from .divergence import TrainingFailed
from .hooks import MemoryDropout, compile_blocks, set_chunk_size
from .loop import Loop, Outcome, Verdict
from .model_sources import model_source
from .randomness import seed_everything
from .run_state import RunProgress, RunState
from .runs import check_folder, prepare_folder, saved_model_config
from .schedules import chunk_size, lr_factor, polarisation
from .step import Stepper, StepResult
from .tbptt import CarriedState
from .telemetry import (
    Metrics,
    Speed,
    check_trackers,
    cut_after,
    open_tracker,
    read_lines,
    read_metrics,
)
from .validation import Validator, perplexity


@dataclass
class Result:
    """The end of a run. stopped: by a signal, before the last step. saved: whether the last checkpoint was written."""

    path: Path
    step: int
    loss: float
    val_loss: float | None
    stopped: bool
    saved: bool


class Trainer:
    """Trains the model of a config and writes everything to `runs/<name>/`.

    data: the result of `mnemos.data.open_data`, or an object with the same train, validation, tokenizer and vocab_size.
    resume: continue from the newest complete checkpoint of the run `config.name`. display: show progress.

    >>> import tempfile
    >>> from mnemos.train import TrainConfig, Trainer, recipe
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "story.txt").write_text("so it goes, " * 999)
    ...     config = recipe(TrainConfig(folder=f"{folder}/runs"), "debug")
    ...     config.data.sources, config.data.cache_dir = (f"{folder}/story.txt",), folder
    ...     config.model.preset, config.steps = "titans-lmm", 2
    ...     result = Trainer(config).train()
    >>> result.step, result.saved
    (2, True)
    """

    def __init__(self, config: TrainConfig, data: Any = None, resume: bool = False, display: bool = False):
        self.config, self.resume = config, resume
        self.world: World = open_world(config.device)
        if config.data.batch_size % self.world.size:
            raise ValueError(
                f"data.batch_size={config.data.batch_size} must be a multiple of the {self.world.size} processes"
            )
        check_folder(config, resume)
        # a wrong tracker or model config raises before hours of reading data
        check_trackers(config.watch.trackers)
        self.source = model_source(config)
        self.source.check()
        if data is None:
            from ..data import open_data

            data = open_data(config.data, seed=config.seed, rank=self.world.rank, world_size=self.world.size)
        self.data = data
        seed_everything(config.seed)
        saved = saved_model_config(config) if resume else None
        self.model = self.source.build(data, saved).to(self.world.device).train()
        self.size = sum(p.numel() for p in self.source.parameters(self.model).values())
        self.total = config.total_steps(self.size)
        self.path, self._lock = prepare_folder(config, self.world, resume, data.tokenizer)
        self.speed = Speed(
            self.world.device, self.source.flops_per_token(self.model, config.data.seq_len), config.dtype
        )
        self._prepare_model()
        self.progress, carried = RunProgress(), CarriedState()
        self.optimisers = self.source.optimisers(self.model)
        distillation = self.source.distillation(self.model)
        self.stepper = Stepper(self.spread, config, iter(data.train), carried, distillation)
        self.loop = Loop(
            self.optimisers,
            self._batches,
            self.stepper.loss,
            self._lr_factor,
            config.optim.clip,
            self._judge,
            self._after_step,
            self.spread.syncing,
            self.stepper.not_finite,
        )
        self.validator = Validator(config, data, self.spread, self.stepper)
        live = config.watch.display
        self.display = Display(self.path.name, self.total, live) if display and self.world.first else NoDisplay()
        settings = config.checkpoint
        self.checkpoints = Checkpoints(
            self.path / "checkpoints", self.world, settings.keep_last, settings.asynchronous, self.say
        )
        self.run_state = RunState(
            config, self.world, self.source, self.model, self.optimisers, data, carried, self.checkpoints
        )
        self.metrics: Metrics | None = None
        self._unwritten: list[str] = []
        self._stop: str | None = None
        self._recorded: set[str] = set()
        seed_everything(config.seed + self.world.rank)  # processes share the initial weights, not the dropout masks

    def _prepare_model(self) -> None:
        config = self.config
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        MemoryDropout(self.model, config.loss.memory_dropout)
        if config.compile:
            compile_blocks(self.model)
        self.spread = Spread(self.model, self.world, config.parallel, self.source.shards(self.model))

    # ---- the run

    def train(self) -> Result:
        """Run to the last step, or until SIGTERM or Ctrl-C, which save first."""
        began, first = time.perf_counter(), self._begin()
        try:
            if first is None:
                return Result(self.path, self.progress.step, math.nan, self.progress.val_loss, False, True)
            with self._signals():
                self.loop.run(self._steps(first, began))
                return self._end(self.stepper.result)
        finally:
            self.checkpoints.finish()
            self.display.close()
            if self.metrics is not None:
                self.metrics.close()
            if self._lock is not None:
                self._lock.release()

    def _begin(self) -> int | None:
        """Restore or begin a run. Returns the first step, or None if the run is finished."""
        found = self.run_state.restore(self.progress) if self.resume else None
        step = self.progress.step
        if self.resume and self.world.first:
            cut_after(self.path / "samples.jsonl", step)
        self._recorded = self.world.broadcast(self._records_of_the_end()) if found is not None else set()
        if self._recorded == {"validate", "sample"}:
            self.display.say(f"{self.path} is finished: {found} is its last step; train further with a larger --steps")
            return None
        if self.world.first:
            kinds, settings = self.config.watch.trackers, self.config.to_dict()
            trackers = [open_tracker(kind, self.path, self.path.name, settings) for kind in kinds]
            self.metrics = Metrics(self.path, trackers, step if self.resume else None, self.display.say)
        if found is not None:
            self.say(f"resuming from {found}")
        elif self.resume:
            self.say(f"{self.path} has no checkpoint that can be used; starting from the beginning")
        self._describe()
        self.display.start(
            step, slow_first_step(self.config.compile, self.model.config.has_memory, self.world.device.type)
        )
        self.speed.start()
        return step

    def _records_of_the_end(self) -> set[str]:
        """The records of the last step ("validate", "sample") that exist already or are switched off; empty before the last step."""
        step, watch, found = self.progress.step, self.config.watch, set()
        if step < self.total:
            return found
        validated = {record["step"] for record in read_metrics(self.path, "validate")}
        sampled = {record["step"] for record in read_lines(self.path / "samples.jsonl")}
        if not watch.validate_every or step in validated or next(iter(self.data.validation), None) is None:
            found.add("validate")
        if not watch.sample_tokens or step in sampled:
            found.add("sample")
        return found

    # ---- one step, as `Loop` calls it

    def _steps(self, first: int, began: float) -> Iterator[int]:
        """Step numbers up to the last one, or until a process wants to stop. A rollback repeats some."""
        while self.progress.step < self.total:
            yield self.progress.step
            if first == self.progress.step - 1:
                self._log("event", message="first step", seconds=time.perf_counter() - began)
                first = -1
            if self.stepper.result.stop:
                return

    def _batches(self, step: int) -> list[dict[str, Tensor]]:
        self._set_chunk(step)
        self.optimisers.gate_factor = self.source.gate_factor(step, self.total)
        return self.stepper.begin(polarisation(self.config.loss, step, self.total), self._stop is not None)

    def _lr_factor(self, step: int) -> float:
        return lr_factor(self.config.schedule, step, self.total) * self.progress.guard.lr_factor

    def _judge(self, outcome: Outcome) -> Verdict:
        result, guard = self.stepper.end(outcome), self.progress.guard
        return guard.see(result.loss if math.isfinite(result.grad_norm) else math.nan, self.config.checkpoint)

    def _after_step(self, step: int, outcome: Outcome) -> None:
        config, progress, result = self.config, self.progress, self.stepper.result
        self.speed.tokens += result.tokens
        self.speed.waited += result.waited
        progress.tokens += result.tokens
        if outcome.verdict == "good":
            self.run_state.update_average()
        elif outcome.verdict == "back":
            self._roll_back()
            return
        else:
            self.stepper.carried.drop()
            bad = progress.guard.bad_steps
            self.say(f"step {step}: the loss or its gradient is not finite; the step is skipped ({bad} so far)")
        progress.step += 1
        self.display.stepped(progress.step)
        if self._due(config.watch.log_every) or progress.step == self.total:
            self._log_step(result, polarisation(config.loss, step, self.total))
        self._watch()
        due = self._due(config.checkpoint.every) or progress.new_best
        if due and progress.guard.healthy and progress.step < self.total:
            self.run_state.save(progress)

    def _set_chunk(self, step: int) -> None:
        size, config = chunk_size(self.config.schedule, step, self.total), self.model.config
        if size is not None and config.has_memory and config.memory_config.chunk_size != size:
            set_chunk_size(self.model, size)
            self.stepper.carried.drop()
            self.say(f"step {step}: the memory's chunk is now {size}")

    def _roll_back(self) -> None:
        progress, guard, config = self.progress, self.progress.guard, self.config.checkpoint
        why = f"the loss was not finite for {guard.bad_in_a_row} steps in a row"
        if not guard.bad_in_a_row:
            why = f"the smoothed loss rose to {guard.smoothed:.3f} from {guard.lowest:.3f}"
        failed_at = progress.step
        advice = "try a smaller optim.lr, a longer schedule.warmup, or dtype float32"
        if guard.rollbacks >= config.rollbacks:
            raise TrainingFailed(
                f"{why} at step {failed_at}, after {guard.rollbacks} rollbacks; checkpoints are kept: {advice}"
            )
        path = self.run_state.roll_back(progress)
        if path is None:
            raise TrainingFailed(f"{why} at step {failed_at}, and there is no checkpoint to roll back to: {advice}")
        self.say(f"step {failed_at}: {why}; rolled back to {path}, learning rate times {guard.lr_factor:.2f}")

    def _end(self, result: StepResult) -> Result:
        progress, stopped = self.progress, self.progress.step < self.total
        every, validated = self.config.watch.validate_every, "validate" in self._recorded
        if not stopped and every and not self._due(every) and not validated:
            self.validate()
        saved = validated or self.run_state.save(progress, wait=True)
        if stopped:
            then = f"the checkpoint is written; resume with: mnemos train --resume {self.path}"
            who = self._stop or "another process"
            self.say(f"{who} stopped the run at step {progress.step}; {then if saved else 'no checkpoint was written'}")
        elif "sample" not in self._recorded:
            self.sample()
        return Result(self.path, progress.step, result.loss, progress.val_loss, stopped, saved)

    # ---- records and display

    def say(self, sentence: str) -> None:
        """Show a sentence to the user and record it as an event."""
        self.display.say(sentence)
        self._unwritten.append(sentence)
        while self.metrics is not None and self._unwritten:
            self.metrics.log(self.progress.step, "event", message=self._unwritten.pop(0))

    def _log(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.log(self.progress.step, kind, **values)

    def _describe(self) -> None:
        config, report = self.config, getattr(self.data, "report", None)
        place = "one process" if self.world.size == 1 else f"{self.world.size} processes ({self.spread.strategy})"
        self.say(
            f"{config.title}: {self.size:,} parameters, {self.total:,} steps of "
            f"{config.tokens_per_step:,} tokens, {place} on {self.world.device.type}, into {self.path}"
        )
        for sentence in (*self.source.notes(self.model), *advice(config, self.model)):
            self.say(sentence)
        if hasattr(report, "why_skipped"):
            left_out = report.why_skipped()
            text = f"{report.documents:,} documents, {report.tokens:,} tokens of text"
            self.say(text + (f"; skipped: {left_out}" if left_out else ""))
            for note in report.notes:
                self.say(note)

    def _due(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0

    def _log_step(self, result: StepResult, strength: float) -> None:
        guard = self.progress.guard
        numbers: dict[str, Any] = {
            "loss": result.loss,
            "perplexity": perplexity(result.loss),
            "lr": self.optimisers.lr,
            "grad_norm": result.grad_norm,
            "tokens": self.progress.tokens,
            "smoothed_loss": guard.smoothed,
            "bad_steps": guard.bad_steps,
            "rollbacks": guard.rollbacks,
        }
        if strength:
            numbers |= {"polarisation": result.polarisation, "polarisation_lambda": strength}
        if self.stepper.distillation is not None:
            numbers["distillation"] = result.distillation
        numbers |= self.speed.look()
        numbers["seconds_left"] = self.display.time_left(self.progress.step)
        self._log("train", **numbers)
        self.display.update(self.progress.step, numbers)

    def _watch(self) -> None:
        watch, began = self.config.watch, time.perf_counter()
        if self._due(watch.validate_every):
            self.validate()
        if self._due(watch.probe_every):
            found = self.validator.probe()
            if found is not None:
                self._log("probe", **found)
                self.display.update(self.progress.step, {"needle": found["accuracy"]})
        if self._due(watch.sample_every) and self.progress.step < self.total:
            self.sample()
        self.speed.paused += time.perf_counter() - began

    def validate(self) -> float | None:
        """Held-out loss; None without held-out text. Records all of `Validator.validate`."""
        progress, found = self.progress, self.validator.validate(self.run_state.average)
        if found is None:
            return None
        loss, smoothed = found["val_loss"], progress.guard.smoothed
        if smoothed is not None:
            found["gap"] = perplexity(loss) / perplexity(smoothed)
        progress.val_loss = loss
        if loss < progress.best:
            progress.best, progress.new_best = loss, True
        self._log("validate", tokens=progress.tokens, **found)
        mixes = [layer["gate"]["mean"] for layer in found["layers"].values() if "gate" in layer]
        shown = {"val_loss": loss, "bits_per_byte": found["bits_per_byte"], "best": progress.best}
        shown |= {"gate_mean": sum(mixes) / len(mixes)} if mixes else {}
        shown |= {"learning_gain": found["memory"]["gain"]} if "memory" in found else {}
        self.display.update(progress.step, shown)
        return loss

    def sample(self) -> None:
        """Write a sample to samples.jsonl and show it."""
        if not self.config.watch.sample_tokens:
            return
        text, step = self.validator.sample(), self.progress.step
        self.display.sample(step, text)
        try:
            if self.world.first:
                with open(self.path / "samples.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "text": text}) + "\n")
        except OSError as wrong:
            self.say(f"the sample of step {step} cannot be written: {wrong.strerror}")

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        """SIGTERM and Ctrl-C stop the run after the current step; a second signal acts at once."""
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
