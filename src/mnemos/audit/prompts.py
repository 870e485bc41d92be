"""`prompts`: no prompt contains its own answer, except inside its needle."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.tasks import Background
from ..data.tasks.background import NOISE
from ..parsing import parse_json
from .needle import LEAST_DISTANCE, express_problem, questions
from .probe import Probe
from .registry import Outcome, failed, not_applicable, passed, register_check

MAX_BYTES = 1 << 28
SHOWN = 3


@dataclass(frozen=True)
class Prompt:
    """A prompt and its answer. needle: the part of the prompt that may contain the answer, once."""

    prompt: str
    answer: str
    needle: str = ""

    @property
    def leaks(self) -> bool:
        """Whether the answer occurs outside the needle, as whole words, upper or lower case.

        >>> Prompt("The key is 42. The key is", "42", needle="The key is 42.").leaks
        False
        >>> Prompt("The key is 42. Is it 42 or 17?", "42", needle="The key is 42.").leaks
        True
        """
        rest = self.prompt.replace(self.needle, " ", 1) if self.needle else self.prompt
        wanted = r"\s+".join(map(re.escape, self.answer.split()))
        return re.search(rf"(?<!\w){wanted}(?!\w)", rest, re.IGNORECASE) is not None


def read_prompts(source: str | os.PathLike | Iterable[Mapping[str, Any] | Prompt]) -> list[Prompt]:
    """Prompts from a file of JSON lines, or from dictionaries, with "prompt", "answer" and, optionally, "needle"."""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"prompts={str(path)!r:.200} is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"prompts={str(path)!r:.200} is larger than {MAX_BYTES >> 20} MiB")
        text = path.read_bytes().decode("utf-8", errors="replace")
        items = [
            (f"{path.name}:{i}", parse_json(line, f"{path.name}:{i}"))
            for i, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    else:
        items = [(f"prompt {i}", item) for i, item in enumerate(source, 1)]
    return [item if isinstance(item, Prompt) else _prompt(place, item) for place, item in items]


def _prompt(place: str, item: Any) -> Prompt:
    if not isinstance(item, Mapping) or not item.keys() >= {"prompt", "answer"}:
        raise ValueError(f'{place} must be an object with "prompt" and "answer"')
    found = {name: item.get(name) or "" for name in ("prompt", "answer", "needle")}
    wrong = next((name for name, value in found.items() if not isinstance(value, str)), None)
    if wrong or not found["answer"].strip():
        raise ValueError(f'{place}: "{wrong or "answer"}" must be a text{"" if wrong else " that is not empty"}')
    if found["needle"] not in found["prompt"]:
        raise ValueError(f"{place}: the needle is not a part of the prompt")
    return Prompt(**found)


@register_check("prompts", "no prompt contains its own answer outside its needle")
def prompts(probe: Probe) -> Outcome:
    given = probe.prompts
    if given is None and probe.tokenizer is None:
        return not_applicable("no prompts are given (--prompts FILE), and there is no tokenizer for those of the audit")
    refusal = express_problem(probe) if given is None else None
    if refusal is not None:
        return not_applicable(refusal)
    found = given if given is not None else own_prompts(probe)
    if not found:
        return not_applicable("there are no prompts")
    wrong = [i for i, prompt in enumerate(found, 1) if prompt.leaks]
    kind = "prompts of the needle check" if given is None else "prompts"
    if not wrong:
        return passed(f"{len(found)} {kind}, none contains its answer", 0.0, 0.0)
    shown = ", ".join(map(str, wrong[:SHOWN]))
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    text = f"{len(wrong)} of {len(found)} {kind} contain their answer outside the needle: number {shown}{more}"
    return failed(text, float(len(wrong)), 0.0, prompts=wrong)


def own_prompts(probe: Probe) -> Sequence[Prompt]:
    """The prompts of the needle check, as the model gets them: decoded from their tokens."""
    background = Background(NOISE, probe.tokenizer)
    made = []
    for q in questions(probe.settings.samples, probe.settings.seed):
        for distance in (0, LEAST_DISTANCE):
            needle = q.prompt(probe.tokenizer, background, distance, q.options[0])
            text = probe.tokenizer.decode([int(i) for i in needle.ids])
            made.append(Prompt(text, needle.answer, needle.sentence if needle.sentence in text else ""))
    return made
