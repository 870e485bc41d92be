"""`needle`: a fact is recalled from beyond the reach of attention, because it was written, and not for another reason.

Four kinds of prompts, each with the same questions and the same four options; chance is 1/4:
near      the needle directly before the question: can the model answer at all?
far       the needle further back than attention reaches through all layers
shuffled  as far, with the value of another question in the needle: the options of this one must be at chance
unwritten as far, while the memory does not write (if the model has such a switch): must be at chance
"""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.tasks import Background, encode
from ..data.tasks.background import NOISE
from ..data.tasks.needle import Needle, needle_of
from .extent import reach
from .memory import knock_outs
from .probe import Probe
from .registry import PASS, Outcome, failed, not_applicable, passed, register_check

NAMES = ("Alice", "Bruno", "Clara", "David", "Elena", "Frank", "Greta", "Henry")
OPTIONS = 4
RARE = 1e-3  # a score is above chance if chance alone reaches it more rarely than this
LEAST_DISTANCE = 256  # tokens between needle and question, also if attention reaches less far
PROMPT_LENGTHS = (2048, 1024)  # longest prompt; of a large model whose attention reaches beyond the longest anyway
DEPTH, MARGIN = 0.1, 48  # the first tokens of a text may be visible to attention as sinks


@dataclass(frozen=True)
class Score:
    """Right answers, and questions asked: all, or of a large model those after which the verdict cannot change."""

    right: int
    asked: int

    @property
    def share(self) -> float:
        return self.right / self.asked

    def __str__(self) -> str:
        return f"{self.right} of {self.asked}"


@dataclass(frozen=True)
class Question:
    """A question about `name`, and its options, of which the first is right."""

    name: str
    options: tuple[str, ...]

    def prompt(self, tokenizer, background: Background, distance: int, value: str) -> Needle:
        """The prompt whose needle holds `value`, `distance` tokens before the question; 0: directly before it."""
        sentence, question = f"The code of {self.name} is {value}.", f"The code of {self.name} is"
        least = len(encode(tokenizer, f"{sentence} ")) + len(encode(tokenizer, f"\n{question}"))
        straw = math.ceil(distance / (1 - DEPTH)) + (MARGIN if distance else 0)
        depth = DEPTH if distance else 1.0
        return needle_of(sentence, question, value, least + straw, depth, tokenizer, background, self.options)


def questions(count: int, seed: int) -> list[Question]:
    """Questions with options that no other question has."""
    draw = random.Random(f"audit:{seed}")
    values = draw.sample(range(1000, 10_000), OPTIONS * count)
    groups = [values[i : i + OPTIONS] for i in range(0, len(values), OPTIONS)]
    return [Question(draw.choice(NAMES), tuple(str(v) for v in group)) for group in groups]


def chance_of(right: int, of: int) -> float:
    """The probability that guessing gets `right` or more of `of` questions.

    >>> round(chance_of(14, 24), 4), chance_of(0, 24)
    (0.0005, 1.0)
    """
    p = 1 / OPTIONS
    return math.fsum(math.comb(of, k) * p**k * (1 - p) ** (of - k) for k in range(right, of + 1))


@register_check(
    "needle", "a fact beyond the reach of attention is recalled, and only because it was written", ["batch"]
)
def needle(probe: Probe) -> Outcome:
    if probe.tokenizer is None:
        return not_applicable("there is no tokenizer for texts")
    distance, refusal = _distance(probe)
    refusal = refusal or express_problem(probe)
    if refusal is not None:
        return not_applicable(refusal)
    count = probe.settings.samples
    asked = questions(count, probe.settings.seed)
    background = Background(NOISE, probe.tokenizer)
    values = [q.options[0] for q in asked]
    needed = next(n for n in range(count + 1) if chance_of(n, count) < RARE)
    kinds = 4 if "writes" in knock_outs(probe.own.model) else 3
    probe.expect(kinds * count)

    def score(distance: int, values: list[str]) -> Score:
        right = 0
        for i, (q, value) in enumerate(zip(asked, values), 1):
            right += _is_right(probe, q.prompt(probe.tokenizer, background, distance, value), q)
            probe.tick()
            if probe.is_large and (right >= needed or right + count - i < needed):
                return Score(right, i)
        return Score(right, count)

    def is_recall(found: Score) -> bool:
        return found.right >= needed

    near = score(0, values)
    scores = {"near": near.share, "distance": distance}
    if not is_recall(near):
        text = f"the model recalls {near} even directly before the question: chance is 1 in {OPTIONS}"
        return not_applicable(text, near.share, **scores)
    far = score(distance, values)
    scores["far"] = far.share
    switch = knock_outs(probe.own.model).get("writes")
    said = f"recalled {far} from {distance:,} tokens back ({near} from nearby)"
    if not is_recall(far):
        if switch is None:
            return not_applicable(f"{said}, and no memory is known that should", far.share, **scores)
        return failed(f"{said}: the memory carries no fact beyond attention", far.share, 1 / OPTIONS, **scores)
    shuffled = score(distance, values[1:] + values[:1])
    scores["shuffled"] = shuffled.share
    if is_recall(shuffled):
        text = f"{said}, but {shuffled} also if the needle holds another answer: the score is no recall"
        return failed(text, shuffled.share, 1 / OPTIONS, **scores)
    if switch is None:
        return passed(f"{said}, {shuffled} with shuffled answers", far.share, 1 / OPTIONS, **scores)
    with switch():
        unwritten = score(distance, values)
    scores["unwritten"] = unwritten.share
    if is_recall(unwritten):
        text = f"{said}, but {unwritten} also if nothing is written: the recall is not the memory's"
        return failed(text, unwritten.share, 1 / OPTIONS, **scores)
    return passed(
        f"{said}, {shuffled} with shuffled answers, {unwritten} with nothing written",
        far.share,
        1 / OPTIONS,
        **scores,
    )


def _distance(probe: Probe) -> tuple[int, str | None]:
    """Tokens between needle and question, or the reason why there is none that would prove anything."""
    seen = probe.settings.window if probe.settings.window is not None else reach(probe.own.model)
    if seen is None:
        return 0, "the reach of its attention is not known: give --window TOKENS (through all layers)"
    if math.isinf(seen):
        return 0, "attention reaches every token: nothing lies beyond it"
    wanted = max(int(seen) + 1, LEAST_DISTANCE)
    if wanted <= _room(probe, PROMPT_LENGTHS[0]):
        return wanted, None
    room = _room(probe, PROMPT_LENGTHS[probe.is_large])
    if "writes" in knock_outs(probe.own.model) and room > 2 * max(probe.sizes, default=0):
        return room, None  # what layers of attention relay to each other remains if nothing is written
    return 0, f"attention reaches {int(seen):,} tokens through all layers: give --max-length {2 * wanted}"


def _room(probe: Probe, usual: int) -> int:
    """Tokens between needle and question in the longest prompt."""
    most = probe.settings.max_length or usual
    return int((min(most, probe.own.max_length or most) - 3 * MARGIN) * (1 - DEPTH))


def express_problem(probe: Probe) -> str | None:
    """Why the questions cannot be expressed in the model's tokens; None if they can."""
    try:
        text = NOISE + "".join(f"\nThe code of {name} is 0123456789." for name in NAMES)
        ids = encode(probe.tokenizer, text)
    except Exception as wrong:  # of a tokenizer that knows a few words alone
        return f"the tokenizer cannot express the questions ({type(wrong).__name__})"
    if max(ids) >= probe.own.logits_size:
        return f"the tokenizer has ids up to {max(ids):,} or more, the model {probe.own.logits_size:,}"
    return None


@torch.no_grad()
def _is_right(probe: Probe, prompt: Needle, question: Question) -> bool:
    """Whether the first option is the likeliest per token behind the prompt; a tie is wrong."""
    ids = torch.from_numpy(prompt.ids).long()
    answers = [encode(probe.tokenizer, f" {option}") for option in question.options]
    longest = max(map(len, answers))
    rows = torch.tensor([a + [a[-1]] * (longest - len(a)) for a in answers])  # O L
    log_p = _answer_logits(probe, ids, rows).double().log_softmax(-1).cpu()  # O L V
    found = log_p.gather(2, rows[..., None]).squeeze(2)  # O L
    scores = [float(row[: len(a)].mean()) for row, a in zip(found, answers)]
    return all(scores[0] > other for other in scores[1:])


def _answer_logits(probe: Probe, ids: Tensor, answers: Tensor) -> Tensor:
    """The logits that predict each token of answers (O, L) behind the prompt ids (P,) -> (O, L, V).

    Where the check `cached` passed, the prompt is read once and its state is repeated; else each answer is read behind a prompt of its own.
    """
    model, count = probe.own, len(answers)
    if answers.shape[1] > 1 and probe.status_of("cached") == PASS:
        first, state = model.step(ids[None])
        repeated = None
        with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):  # of a state that only reorders rows
            repeated = model.select(state, [0] * count)
        if repeated is not None:
            rest = model.step(answers[:, :-1], repeated)[0]
            return torch.cat([first[:, -1:].expand(count, -1, -1), rest], 1)
    rows = torch.cat([ids.expand(count, -1), answers], 1)
    return model.logits(rows)[:, len(ids) - 1 : -1]
