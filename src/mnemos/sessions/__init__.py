"""Sessions: conversations whose model state is kept, saved, forked and resumed. Needs transformers.

`SessionRecord` is the file, `SessionStore` a folder of files, `Session` a conversation with a model.
"""

from .answer_text import AnswerText
from .dialogue import Dialogue
from .identity import model_hash
from .record import SessionInfo, SessionRecord, Turn, check_name, read_info
from .sampling import Sampling
from .session import Session
from .store import SessionChanged, SessionStore, StoreFull
from .text_stream import TextStream
from .turn import OpenTurn

__all__ = [
    "AnswerText",
    "Dialogue",
    "OpenTurn",
    "Sampling",
    "Session",
    "SessionChanged",
    "SessionInfo",
    "SessionRecord",
    "SessionStore",
    "StoreFull",
    "TextStream",
    "Turn",
    "check_name",
    "model_hash",
    "read_info",
]
