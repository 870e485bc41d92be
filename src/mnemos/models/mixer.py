"""The base of all mixers and the registry of blocks. A new block is a class with `forward` under `@register_block`.

Shapes: B batch, T time, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn

from ..nn.block import MixerParts

if TYPE_CHECKING:
    from .cache_forms import CacheForm
    from .config import MnemosConfig

State = dict[str, Any]  # the states of one layer by name


class Mixer(nn.Module):
    """Base of all mixers, the part of a block that mixes tokens: x + mixer(norm(x)), then x + feedforward(norm(x)).

    Subclass it, set `name` (a value of `MnemosConfig.layers`) and `description`, and pass the class to `register_block`.
    `__init__` takes the config. Submodules with parameters of their own have `reset_parameters`, as torch's layers do.

    has_memory: whether it has a `NeuralMemory` made from `config.memory_config`.
    has_attention: whether it uses `config.attention_options`, which the config then checks.
    is_kv_cache: whether its states grow with every token, apart from those of its memory.
    has_segments: whether it works on segments of `config.segment_length` tokens.
    supports_kv_memory: whether its memory may be a growing list of keys and values (features "exp").
    without_memory: the block in its place where `memory_layers` leaves its layer out; None: it stays.

    >>> from mnemos.models import MnemosConfig, MnemosModel, register_block
    >>> from mnemos.nn.conv import CausalConv1d
    >>> @register_block
    ... class Convolution(Mixer):
    ...     name, description = "doc_convolution", "a causal convolution"
    ...     def __init__(self, config):
    ...         super().__init__(config)
    ...         self.conv = CausalConv1d(config.hidden_size)
    ...     def forward(self, x, state, mask, persistent, use_cache):
    ...         return self.conv(x, mask=mask)[0], None
    >>> config = MnemosConfig(hidden_size=32, num_hidden_layers=2, layers="doc_convolution", use_cache=False)
    >>> model = MnemosModel(config)
    """

    name: ClassVar[str]
    description: ClassVar[str] = ""
    has_memory: ClassVar[bool] = False
    has_attention: ClassVar[bool] = False
    is_kv_cache: ClassVar[bool] = False
    has_segments: ClassVar[bool] = False
    supports_kv_memory: ClassVar[bool] = True
    without_memory: ClassVar[str | None] = None

    def __init__(self, config: MnemosConfig):
        super().__init__()

    def forward(
        self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool
    ) -> tuple[Tensor, State | None]:
        """x (B, T, D) after the tokens of `state` -> the term (B, T, D) that the block adds to x, and the new state.

        state: the states that the last call returned, by name; None for the first tokens of a sequence. A state has `batch`,
        `nbytes`, `clone`, `detach`, `to`, `select` and `stack`: a `MemoryState`, or a subclass of `mnemos.nn.RowCache`. The new
        state is None without use_cache, else a dict. mask: (B, T) bool, True on a prefix of each row, or None for all tokens; a token behind that
        prefix must not change the state. persistent: in the first call, how many of the first tokens are persistent.
        """
        raise NotImplementedError

    def parts(self) -> MixerParts | None:
        """The parts, if a kernel may compute this mixer from them alone; None: it is computed by `forward`.

        A class that overrides this must return None for its subclasses, which may compute something else.
        """
        return None

    @classmethod
    def attention_span(cls, config: MnemosConfig) -> int | None:
        """The number of tokens that a token attends to, itself included; 0 without attention, None for all tokens before it."""
        return config.attention_window if cls.has_attention else 0

    @classmethod
    def cache_forms(cls, config: MnemosConfig) -> dict[str, CacheForm] | None:
        """The form of each state by name, by which saved caches are checked; None: a cache of this block cannot be saved."""
        return None


BLOCKS: dict[str, type[Mixer]] = {}
Kind = TypeVar("Kind", bound=Mixer)


def register_block(cls: type[Kind]) -> type[Kind]:
    """Make a mixer available as a block under its `name`; usable as a decorator."""
    check_registration("block", cls, Mixer, BLOCKS)
    if cls.has_memory and cls.without_memory is None:
        raise ValueError(
            f"block {cls.name!r} has a memory: set without_memory to the block in its place, 'swa' for example"
        )
    BLOCKS[cls.name] = cls
    return cls


def check_registration(kind: str, cls: type, base: type, known: dict[str, Any]) -> None:
    """Raise a ValueError for a class that is not of `base`, has no name, or has the name of another class in `known`."""
    name = getattr(cls, "name", None)
    if not (isinstance(cls, type) and issubclass(cls, base)) or not isinstance(name, str) or not name:
        raise ValueError(f"{cls!r:.60} cannot be registered: a {kind} is a subclass of {base.__name__} with a `name`")
    other = known.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"{kind} {name!r} is registered already: choose another name")
