"""Language models built by hand, healthy and broken on purpose: each fault is one overridden step.

`Echo` recalls: it looks for the latest earlier place with the same tokens before it, in a window and in a memory, and predicts what
came next there. The others are small attention and recurrent models with random weights.
Shapes: B rows, T tokens, V vocabulary, D width, H heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS = 61, 16, 2


class TinyAttention(nn.Module):
    """One layer of causal attention with rotary positions, and a cache (keys, values). Interface of transformers."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, labels=None, use_cache=False
    ):
        past = 0 if past_key_values is None else past_key_values[0].shape[2]
        position = self.positions(input_ids, position_ids, past)
        x = self.embed(input_ids)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))  # B H T d
        q, k = rotate(q, position), rotate(k, position)
        if past_key_values is not None:
            k, v = torch.cat([past_key_values[0], k], 2), torch.cat([past_key_values[1], v], 2)
        seen = self.sees(torch.arange(past, k.shape[2])[:, None], torch.arange(k.shape[2]))[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None].bool()
        seen = seen | torch.eye(k.shape[2], dtype=torch.bool)[past:]  # padding sees itself
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        x = x + self.out(self.rows(y))
        logits = self.head(x + self.mlp(x))
        return SimpleNamespace(
            loss=None if labels is None else self.loss(logits, labels),
            logits=logits,
            past_key_values=(k, v) if use_cache else None,
        )

    def positions(self, ids: Tensor, position_ids: Tensor | None, past: int) -> Tensor:
        return torch.arange(past, past + ids.shape[1])[None] if position_ids is None else position_ids

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def rows(self, y: Tensor) -> Tensor:
        return y

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """x (B, H, T, d), position (B, T): rotary embedding with fast angles, so that positions matter."""
    half = x.shape[-1] // 2
    angle = position[:, None, :, None] * (1.0 / 3.0 ** torch.arange(half)).to(x)
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class LeaksOneToken(TinyAttention):
    def sees(self, query, key):
        return key <= query + 1


class LeaksInsideSegment(TinyAttention):
    """Segments of 8 tokens see all of themselves."""

    def sees(self, query, key):
        return key // 8 <= query // 8


class LeaksAtOneEdge(TinyAttention):
    """Only the last token of the first segment of 8 sees the token behind it."""

    def sees(self, query, key):
        return (key <= query) | ((query == 7) & (key == 8))


class LeaksWithACache(TinyAttention):
    """Causal in one call; with a cache, a call sees all of itself."""

    def sees(self, query, key):
        return (key <= query) | (query[0] > 0)


class LeaksAlmostNothing(TinyAttention):
    """Later tokens count a millionth: as much as rounding in float32."""

    def rows(self, y):
        return y + 1e-6 * y.mean(1, keepdim=True)


class RestartsPositions(TinyAttention):
    """The cache forgets how long it is: every call begins at position 0."""

    def positions(self, ids, position_ids, past):
        return super().positions(ids, position_ids, 0)


class MixesRows(TinyAttention):
    def rows(self, y):
        return y + 0.1 * y.mean(0, keepdim=True)


class CountsPadding(TinyAttention):
    """The absolute position of a token counts the padding in front of it."""

    def __init__(self):
        super().__init__()
        self.place = nn.Embedding(512, WIDTH)

    def positions(self, ids, position_ids, past):
        self.shift = self.place(torch.arange(past, past + ids.shape[1]))
        return super().positions(ids, None, past)

    def rows(self, y):
        return y + self.shift


class ScoresTheTokenItself(TinyAttention):
    def loss(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class HasADeadParameter(TinyAttention):
    def __init__(self):
        super().__init__()
        self.forgotten = nn.Parameter(torch.randn(WIDTH))

    def rows(self, y):
        return y + 0.0 * self.forgotten


class GatedAtZero(TinyAttention):
    """A branch behind a factor that starts at 0 has a gradient from the second step on: no fault."""

    def __init__(self):
        super().__init__()
        self.branch, self.factor = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(1))

    def rows(self, y):
        return y + self.factor * self.branch(y)


class KeepsSomethingBetweenCalls(TinyAttention):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))

    def rows(self, y):
        y = y + self.last
        self.last = 0.1 * y.detach()[0, 0]
        return y


class Recurrent(nn.Module):
    """A linear recurrence with a convolution of width 2: (logits, state), a constant state, and a memory that can be knocked out."""

    has_constant_state = True

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.mix = nn.Embedding(VOCAB, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.write, self.read, self.head = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, VOCAB))
        self.decay = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.switched_off: str | None = None

    def forward(self, ids: Tensor, state: dict[str, Any] | None = None):
        x = self.embed(ids)
        state = self.start(len(ids), x) if state is None else self.resumed(state, ids.shape[1])
        before = torch.cat([state["tail"][:, None], x[:, :-1]], 1)
        u = self.mix(torch.cat([x, before], -1)).tanh()
        memory, read = state["memory"], []
        for t in range(ids.shape[1]):
            if self.switched_off != "writes":
                memory = self.decay.sigmoid() * memory + self.write(u[:, t])
            read.append(memory)
        y = torch.stack(read, 1)
        y = self.read(y) if self.switched_off != "reads" else torch.zeros_like(y)
        return self.head(u + self.use(y)), self.kept({"memory": memory, "tail": x[:, -1]}, state, ids)

    def start(self, rows: int, x: Tensor) -> dict[str, Any]:
        return {"memory": x.new_zeros(rows, WIDTH), "tail": x.new_zeros(rows, WIDTH)}

    def resumed(self, state, tokens):
        return state

    def use(self, y: Tensor) -> Tensor:
        return y

    def kept(self, new, old, ids):
        return new

    @contextlib.contextmanager
    def knock_out(self, what: str) -> Generator[None]:
        self.switched_off = what
        try:
            yield
        finally:
            self.switched_off = None


class ForgetsItsTail(Recurrent):
    """A call of several tokens begins with an empty convolution; one token at a time is right."""

    def resumed(self, state, tokens):
        return state if tokens == 1 else state | {"tail": torch.zeros_like(state["tail"])}


class HasADeadMemory(Recurrent):
    """The memory is read, its output is lost to rounding."""

    def use(self, y):
        return 1e-12 * y


class ActsBehindAMark(Recurrent):
    """The memory acts in calls that begin with "###" alone, behind the mark; random texts do not begin so."""

    def use(self, y):
        return y * self.marked

    def forward(self, ids: Tensor, state: dict[str, Any] | None = None):
        marked = (ids[:, :3] == ord("#")).all(1) & (ids.shape[1] >= 3)
        behind = marked[:, None] & (torch.arange(ids.shape[1]) >= 2)
        self.marked = behind[..., None].to(self.embed.weight.dtype)
        return super().forward(ids, state)


class Grows(Recurrent):
    """Promises a constant state, and keeps every token."""

    def kept(self, new, old, ids):
        return new | {"tokens": torch.cat([old.get("tokens", ids[:, :0]), ids], 1)}


class GrowsInALIst(Recurrent):
    """The same, out of the sight of whoever counts tensors."""

    def kept(self, new, old, ids):
        return new | {"tokens": [*old.get("tokens", []), *ids[0].tolist()]}


class HidesState(Recurrent):
    """Half of the memory is in the module, for the batch size that it was made with: a row goes on from it, not from its own state."""

    def start(self, rows, x):
        self.hidden = None
        return super().start(rows, x)

    def resumed(self, state, tokens):
        return state | {"memory": self.hidden}

    def kept(self, new, old, ids):
        self.hidden = new["memory"]
        return new


class Echo(nn.Module):
    """Predicts what came after the latest earlier place with the same `order` tokens before it: beyond the window by a memory.

    Without a cache. The memory also adds its size to the logits, so that it matters on any text.
    """

    def __init__(self, window: int = 64, order: int = 6, vocab: int = 256):
        super().__init__()
        self.window, self.order, self.vocab = window, order, vocab
        self.sharp = nn.Parameter(torch.tensor(8.0))
        self.switched_off: str | None = None

    def forward(self, ids: Tensor) -> Tensor:
        logits = F.one_hot(ids, self.vocab).to(self.sharp) * 0.01
        for row in range(len(ids)):
            logits[row] += self.sharp * self.votes(ids[row].tolist())
        return logits

    def votes(self, ids: list[int]) -> Tensor:
        """(T, V): 1 for the token that came next the last time, and a little for the number of tokens in the memory."""
        places: dict[tuple[int, ...], int] = {}  # the token behind each context, as the window sees it
        memory: dict[tuple[int, ...], int] = {}
        chosen = [(0, 0, 0.0)]
        for t in range(len(ids)):
            if t >= self.order:
                context = tuple(ids[t - self.order : t])
                places[context] = t
                if self.switched_off != "writes":
                    memory[context] = ids[t]
            now = tuple(ids[t - self.order + 1 : t + 1])
            if t - places.get(now, -self.window) < self.window:
                chosen.append((t, ids[places[now]], 1.0))
            elif self.switched_off != "reads" and self.holds(now, memory):
                chosen.append((t, memory[now], 1.0))
            if self.switched_off != "reads":
                chosen.append((t, len(memory) % self.vocab, 0.001))
        found = torch.zeros(len(ids), self.vocab, dtype=self.sharp.dtype)
        rows, tokens, votes = zip(*chosen)
        return found.index_put((torch.tensor(rows), torch.tensor(tokens)), found.new_tensor(votes), accumulate=True)

    def holds(self, key: tuple[int, ...], memory: dict[tuple[int, ...], int]) -> bool:
        return key in memory

    knock_out = Recurrent.knock_out


class EchoesNearbyAlone(Echo):
    """The memory has a size, but recalls nothing."""

    def holds(self, key, memory):
        return False


class KnowsTheAnswers(Echo):
    """Has seen the questions of the benchmark: right answers are likely whatever the text holds."""

    def __init__(self, answers: list[str], **sizes):
        super().__init__(**sizes)
        self.answers = [list(f" {answer}".encode()) for answer in answers]

    def votes(self, ids):
        found = super().votes(ids)
        for t in range(len(ids)):
            for answer in self.answers:
                for n in range(1, len(answer)):
                    if ids[max(0, t - n + 1) : t + 1] == answer[:n]:
                        found[t, answer[n]] = 2
        return found
