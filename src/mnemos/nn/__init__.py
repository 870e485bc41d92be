"""Layers without a memory: attention with exact caches, rotary positions, feed-forward, the Q-K projection.

Needs torch alone. Every layer is (x, cache) -> (y, cache), and any split of a sequence into calls gives the same y.
"""

from .attention import Attention, AttentionCache
from .attention_segment import SegmentAttention, SegmentCache
from .cache import RowCache
from .feedforward import SwiGLU
from .heads import apply_rotary, rotary_table, rotate
from .qk_projection import QKCache, QKProjection

__all__ = [
    "Attention",
    "AttentionCache",
    "QKCache",
    "QKProjection",
    "RowCache",
    "SegmentAttention",
    "SegmentCache",
    "SwiGLU",
    "apply_rotary",
    "rotary_table",
    "rotate",
]
