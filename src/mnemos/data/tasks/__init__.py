"""Synthetic tasks: seeded generators for training and for evaluation, in numpy and plain Python.

`mqar` and `mad` generate token ids; `needle` and `babilong` hide sentences in any text, with any tokenizer.
"""

from ..tokenizer import ByteTokenizer
from .babilong import BABI_TASKS, Hidden, Story, hide, story
from .background import NOISE, Background
from .examples import IGNORED, Examples
from .mad import MAD_TASKS, mad
from .mqar import MQAR_PRESETS, mqar
from .needle import NEEDLE_TASKS, Needle, needle, needle_of
from .text import TokenizerLike, encode

__all__ = [
    "BABI_TASKS",
    "IGNORED",
    "MAD_TASKS",
    "MQAR_PRESETS",
    "NEEDLE_TASKS",
    "NOISE",
    "Background",
    "ByteTokenizer",
    "Examples",
    "Hidden",
    "Needle",
    "Story",
    "TokenizerLike",
    "encode",
    "hide",
    "mad",
    "mqar",
    "needle",
    "needle_of",
    "story",
]
