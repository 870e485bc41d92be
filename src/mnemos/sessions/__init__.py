"""Sessions: conversations whose model state is kept, saved, forked and resumed. Needs transformers.

`SessionRecord` is the file, `SessionStore` a folder of files, `Session` a conversation with a model.
"""

from .identity import model_hash
from .record import SessionInfo, SessionRecord, Turn, check_name, read_info
from .store import SessionStore, StoreFull

__all__ = [
    "SessionInfo",
    "SessionRecord",
    "SessionStore",
    "StoreFull",
    "Turn",
    "check_name",
    "model_hash",
    "read_info",
]
