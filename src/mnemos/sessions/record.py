"""`SessionRecord`: a conversation and the state of its model, as one safetensors file.

The file has the tensors of the cache (`cache.*`), the turns as JSON in UTF-8 (`turns`, uint8), and a header with all other fields, which
can be read alone. A file from a stranger is checked completely before it is used.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..atomic_io import sync_folder
from ..memory.files import one_line, read_tensors, write_tensors
from ..memory.state_validation import MAX_POSITION
from ..models import MnemosCache, MnemosConfig
from ..models.cache_io import cache_forms
from ..parsing import parse_json
from .identity import model_hash

if TYPE_CHECKING:
    from ..attach import AttachedCache

FORMAT = "mnemos.session/1"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
ROLES = ("system", "user", "assistant")
MAX_TITLE = 200  # characters
MAX_OWNER = 256  # characters
MAX_PENDING = 2**20  # tokens
MAX_TURNS = 2**20
MAX_TURNS_BYTES = 2**28
FIELDS = ("name", "title", "pending", "tokens_read", "model_hash", "owner", "created", "updated", "turns")
ATTACHED, OWN = "attached", "mnemos"


class Turn(TypedDict):
    """One message. tokens: how many tokens of the model it is, those of the chat template included. created: seconds since 1970."""

    role: str
    content: str
    tokens: int
    created: float


def check_name(name: Any) -> str:
    """A valid name of a session; raises a ValueError for any other.

    >>> check_name("ann-2.b")
    'ann-2.b'
    >>> check_name("../ann")
    Traceback (most recent call last):
    ValueError: session '../ann' is not a valid name: 1 to 128 of the characters A-Z a-z 0-9 . _ -, the first no dot
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"session {name!r:.80} is not a valid name: 1 to 128 of the characters A-Z a-z 0-9 . _ -, the first no dot"
        )
    return name


@dataclass
class SessionInfo:
    """A session file's header: everything but the state and the texts. turns: their number. file_bytes: size of the file.
    state_bytes: of the state in it."""

    name: str
    title: str
    turns: int
    tokens_read: int
    pending: int
    model_hash: str
    owner: str
    created: float
    updated: float
    file_bytes: int = 0
    state_bytes: int = 0


@dataclass
class SessionRecord:
    """A conversation and the state of its model.

    name: one path component, see `check_name`. title: free text of at most 200 characters. turns: the messages so far.
    cache: the state of the model, batch 1; None before the first token. pending: token ids that belong to the conversation and are not
    in the cache yet, such as the last generated token; the next turn begins with them. tokens_read: tokens in the cache.
    model_hash: of the model that the cache belongs to, see `mnemos.sessions.model_hash`. owner: an opaque text, or "".
    created, updated: seconds since 1970.

    >>> import tempfile
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("deltanet", "nano")).eval()
    >>> cache = model.state(torch.tensor([list(b"hello")]))
    >>> record = SessionRecord("ann", cache=cache, pending=[33], tokens_read=5, model_hash=model_hash(model))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record.save(f"{folder}/ann.safetensors")
    ...     SessionRecord.load(f"{folder}/ann.safetensors", model).pending
    [33]
    """

    name: str
    title: str = ""
    turns: list[Turn] = field(default_factory=list)
    cache: MnemosCache | AttachedCache | None = None
    pending: list[int] = field(default_factory=list)
    tokens_read: int = 0
    model_hash: str = ""
    owner: str = ""
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return 0 if self.cache is None else self.cache.nbytes

    def check(self) -> None:
        """Raise a ValueError for the first field that is not valid."""
        _check_fields("the session", self._fields(), len(self.turns))
        _check_turns("the session", self.turns)
        _check_cache("the session", self.cache, self.tokens_read)

    def _fields(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in FIELDS if name != "turns"}
        return found | {"turns": len(self.turns)}

    def _contents(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and header of the file."""
        self.check()
        tensors, header = _cache_contents(self.cache)
        turns = json.dumps(self.turns, ensure_ascii=False).encode()
        if len(turns) > MAX_TURNS_BYTES:
            raise ValueError(f"the turns of {self.name} have {len(turns):,} bytes, but at most {MAX_TURNS_BYTES:,} fit")
        contents = {f"cache.{name}": x for name, x in tensors.items()}
        contents["turns"] = torch.frombuffer(bytearray(turns), dtype=torch.uint8)
        return contents, {"format": FORMAT, "session": json.dumps(self._fields()), "cache": json.dumps(header)}

    @property
    def file_bytes(self) -> int:
        """Size of the file that `save` writes, a little too large rather than too small."""
        tensors, header = self._contents()
        texts = sum(len(json.dumps(text)) for text in header.values())
        return sum(x.numel() * x.element_size() + len(name) + 100 for name, x in tensors.items()) + texts + 100

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file: a temporary name, synced to disk, then renamed. An existing file is replaced, or stays as it is."""
        write_tensors(path, *self._contents())
        sync_folder(Path(path).absolute().parent)

    @classmethod
    def load(cls, path: str | os.PathLike, model: Any) -> SessionRecord:
        """Read a file that `save` wrote, for the model that it was made with. Raises a ValueError if anything in it is not valid."""
        tensors, header = read_tensors(path, "session", FORMAT, "cpu")
        fields = _parse_fields(path, header)
        turns = _parse_turns(path, tensors.pop("turns", None))
        if fields.pop("turns") != len(turns):
            raise ValueError(f"{path} does not fit its own header: it has {len(turns)} turns")
        if fields["model_hash"] != model_hash(model):
            raise ValueError(f"{path} belongs to another model, or to other weights of this one")
        vocabulary = model.get_input_embeddings().weight.shape[0]
        if any(token >= vocabulary for token in fields["pending"]):
            raise ValueError(f"{path} has pending tokens beyond the {vocabulary} of the model")
        cache = _read_cache(path, tensors, header, model)
        _check_cache(path, cache, fields["tokens_read"])
        return cls(turns=turns, cache=cache, **fields)


def read_info(path: str | os.PathLike) -> SessionInfo:
    """The header of a session file, after its checks; tensors are not read."""
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            data = size - 8 - int.from_bytes(file.read(8), "little")
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            texts = file.get_slice("turns").get_shape() if "turns" in file.keys() else [0]  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as broken:
        raise ValueError(f"{path} is not a readable session: {one_line(broken)}") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a session of this version ({FORMAT})")
    fields = _parse_fields(path, header)
    fields["pending"] = len(fields["pending"])
    return SessionInfo(**fields, file_bytes=size, state_bytes=max(0, data - sum(texts[:1])))


def read_turns(path: str | os.PathLike) -> list[Turn]:
    """The messages of a session file, after their checks; the state is not read."""
    try:
        with safe_open(str(path), framework="pt") as file:
            data = file.get_tensor("turns")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as broken:
        raise ValueError(f"{path} is not a readable session: {one_line(broken)}") from None
    return _parse_turns(path, data)


def exported(source: str | os.PathLike) -> bytes:
    """The contents of a copy of a session file without its owner."""
    from safetensors.torch import save

    tensors, header = read_tensors(source, "session", FORMAT, "cpu")
    return save(tensors, header | {"session": json.dumps(_parse_fields(source, header) | {"owner": ""})})


def rewrite(source: str | os.PathLike, target: str | os.PathLike, **changes: Any) -> None:
    """Write a copy of a session file with other fields (name, title, owner, ...), without a model: fork, rename, export."""
    tensors, header = read_tensors(source, "session", FORMAT, "cpu")
    fields = _parse_fields(source, header) | changes
    _check_fields("the session", fields, fields["turns"])
    write_tensors(target, tensors, header | {"session": json.dumps(fields)})
    sync_folder(Path(target).absolute().parent)


def _parse_fields(path, header: dict[str, str]) -> dict[str, Any]:
    fields = parse_json(header.get("session", ""), f"the header of {path}")
    if not isinstance(fields, dict) or fields.keys() != {*FIELDS}:
        raise ValueError(f"{path} has a broken header: it must have exactly the fields {', '.join(FIELDS)}")
    _check_fields(path, fields, fields["turns"])
    return fields


def _check_fields(where, fields: dict[str, Any], turns: Any) -> None:
    """Raise a ValueError for a field of the wrong type or range."""
    check_name(fields["name"])
    pending, created, updated = (fields[name] for name in ("pending", "created", "updated"))
    for name, right, expected in (
        ("title", _is_text(fields["title"], MAX_TITLE), f"a text of at most {MAX_TITLE} characters"),
        ("owner", _is_text(fields["owner"], MAX_OWNER), f"a text of at most {MAX_OWNER} characters"),
        ("model_hash", _is_hash(fields["model_hash"]), "a SHA-256 in hexadecimal"),
        ("tokens_read", _is_count(fields["tokens_read"], MAX_POSITION), f"a whole number from 0 to {MAX_POSITION}"),
        ("turns", _is_count(turns, MAX_TURNS), f"a whole number from 0 to {MAX_TURNS}"),
        ("pending", _is_tokens(pending), f"a list of at most {MAX_PENDING} token ids"),
        ("created", _is_time(created), "seconds since 1970"),
        ("updated", _is_time(updated), "seconds since 1970"),
    ):
        if not right:
            raise ValueError(f"{where} has {name}={fields[name]!r:.60}, but {expected} is expected")


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest and not re.search("[\ud800-\udfff]", value)


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and (value == "" or re.fullmatch("[0-9a-f]{64}", value) is not None)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_PENDING and all(_is_count(x, 2**31) for x in value)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < 2**53


def _parse_turns(path, data: Tensor | None) -> list[Turn]:
    if data is None or data.dtype != torch.uint8 or data.dim() != 1 or data.numel() > MAX_TURNS_BYTES:
        raise ValueError(f"{path} does not fit its own header: turns must be a text of at most {MAX_TURNS_BYTES} bytes")
    turns = parse_json(data.numpy().tobytes(), f"the turns of {path}")
    _check_turns(path, turns)
    return turns


def _check_turns(where, turns: Any) -> None:
    if not isinstance(turns, list) or len(turns) > MAX_TURNS:
        raise ValueError(f"{where} has turns that are no list of at most {MAX_TURNS} messages")
    for i, turn in enumerate(turns):
        right = (
            isinstance(turn, dict)
            and turn.keys() == Turn.__annotations__.keys()
            and isinstance(turn["role"], str)
            and turn["role"] in ROLES
            and _is_text(turn["content"], MAX_TURNS_BYTES)
            and _is_count(turn["tokens"], MAX_POSITION)
            and _is_time(turn["created"])
        )
        if not right:
            raise ValueError(
                f"{where} has turn {i} as {str(turn)[:60]!r}, but role, content, tokens, created are expected"
            )


def tokens_in(cache: MnemosCache | AttachedCache) -> int:
    """Tokens that a cache of one row has read, without padding and persistent tokens."""
    if not isinstance(cache, MnemosCache):
        return 0 if cache.position is None else int(cache.position[0])
    name, state = next(iter(cache.layers[0].items()))
    before = cache.config.num_persistent_tokens if cache_forms(cache.config)[0][name].counts_persistent else 0
    return int(state.position[0]) - before


def _check_cache(where, cache: MnemosCache | AttachedCache | None, tokens_read: int) -> None:
    if cache is not None and cache.batch != 1:
        raise ValueError(f"{where} has a state of {cache.batch} batch rows, but one is expected")
    found = 0 if cache is None else tokens_in(cache)
    if found != tokens_read or (cache is not None and not found):
        raise ValueError(f"{where} has tokens_read={tokens_read}, but its state has read {found} tokens")


def _cache_contents(cache: MnemosCache | AttachedCache | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a cache, and its header with its kind."""
    if cache is None:
        return {}, {}
    if isinstance(cache, MnemosCache):
        tensors, header = cache.file_contents()
        return tensors, header | {"kind": OWN}
    from ..attach.cache_files import cache_contents

    tensors, header = cache_contents(cache)
    return tensors, header | {"kind": ATTACHED}


def _read_cache(
    path, tensors: dict[str, Tensor], header: dict[str, str], model: Any
) -> MnemosCache | AttachedCache | None:
    """The cache of a session file, of the kind that the model has."""
    about = parse_json(header.get("cache", ""), f"the header of {path}")
    if not isinstance(about, dict) or not all(isinstance(x, str) for x in about.values()):
        raise ValueError(f"{path} has a broken header: cache must be an object of texts")
    foreign = next((name for name in tensors if not name.startswith("cache.")), None)
    if foreign is not None or bool(tensors) != bool(about):
        raise ValueError(f"{path} does not fit its own header: {foreign or 'tensors'!r:.60} without a cache")
    if not about:
        return None
    own = {name.removeprefix("cache."): x for name, x in tensors.items()}
    expected = OWN if isinstance(model.config, MnemosConfig) else ATTACHED
    if about.get("kind") != expected:
        raise ValueError(f"{path} has a state of kind {about.get('kind')!r:.40}, but {expected!r} is that of the model")
    if expected == OWN:
        cache = MnemosCache.from_file_contents(path, own, about, model.config)
        cache.config = model.config  # the same form: calls need not compare them again
        return cache.to(model.device)
    from ..attach.cache_files import cache_from_contents

    return cache_from_contents(path, own, about, model)


def copied(record: SessionRecord, **changes: Any) -> SessionRecord:
    """A record that shares nothing with this one."""
    cache = None if record.cache is None else record.cache.clone()
    turns = [Turn(**turn) for turn in record.turns]
    return dataclasses.replace(record, **{"cache": cache, "turns": turns, "pending": list(record.pending)} | changes)
