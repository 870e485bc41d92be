"""The demo's trained model, kept in the user's cache folder for `mnemos chat`: trained once, then opened in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from ..attach.folders import whole_folder
from ..data.files import cache_folder
from ..models import MnemosForCausalLM
from .facts import facts, pair_ids
from .game import BEFORE_QUESTION
from .results import DemoPlan
from .training import ProgressHook, one_thread, train, training_text

FOLDER = "demo-facts-1"
LEAST_RECALL = 0.8  # in the game; a model below it is not kept
CONFIG = "config.json"


def kept_folder() -> Path:
    """The folder of the kept model, whether it exists or not."""
    return cache_folder(None) / FOLDER


def open_kept(progress: ProgressHook | None = None, plan: DemoPlan | None = None) -> MnemosForCausalLM:
    """The kept model in evaluation mode; the first call trains it. progress: see `training.train`. plan: of the training."""
    folder = kept_folder()
    if not is_kept():
        with FileLock(folder.parent / f".{FOLDER}.lock"):
            if not is_kept() and not keep(
                trained(plan or DemoPlan(), progress)
            ):  # no other process trained it meanwhile
                raise ValueError(
                    "the demo's model has not learned its task here: run `mnemos demo`, which shows its training"
                )
    try:
        model: Any = MnemosForCausalLM.from_pretrained(folder)
    except (ValueError, OSError) as damaged:
        raise ValueError(f"{damaged}; delete the folder {folder} to train the model again") from damaged
    return model.eval()


def is_kept() -> bool:
    """Whether there is a kept model."""
    return (kept_folder() / CONFIG).is_file()


def trained(plan: DemoPlan, progress: ProgressHook | None = None) -> MnemosForCausalLM:
    """A newly trained memory model of the demo."""
    torch.manual_seed(plan.curriculum.seed)
    model = MnemosForCausalLM(plan.memory_config())
    with one_thread():
        train(model, training_text(plan.text_characters)[0], plan.curriculum, progress=progress)
    return model.eval()


def keep(model: MnemosForCausalLM) -> bool:
    """Write a trained model to the user's cache folder, unless one is there or the model has not learned the game. Returns whether it did.

    A kept model is never replaced: saved sessions belong to its weights.
    """
    if is_kept() or game_recall(model) < LEAST_RECALL:
        return False
    with whole_folder(kept_folder()) as part:
        model.save_pretrained(part)
    return True


@torch.no_grad()
def game_recall(model: MnemosForCausalLM, rows: int = 16, pairs: int = 6, seed: int = 1) -> float:
    """Recall of facts in the form of the game: facts one after the other, then one question each."""
    people, things = facts(rows, pairs, np.random.default_rng(seed))
    cache = model.state(pair_ids(people, things))
    text = torch.tensor([list(BEFORE_QUESTION.encode())]).expand(rows, -1)
    right = 0
    for i in range(pairs):
        question = torch.cat([text, people[:, i : i + 1]], 1)
        answers = model(question, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        right += int((answers == things[:, i]).sum())
    return right / (rows * pairs)
