"""`mnemos serve`: an HTTP server with OpenAI's interface, and sessions whose memory lasts. Needs the extra serve.

`Engine` runs the model, `Service` joins it with sessions, `create_app` is the application, `serve` runs it.
"""

from .app import create_app
from .engine import Engine
from .errors import ApiError
from .jobs import Choice, Event, Job
from .keys import Keys
from .limits import Limits
from .logs import Log
from .metrics import Metrics
from .run import is_loopback, serve
from .service import Service

__all__ = [
    "ApiError",
    "Choice",
    "Engine",
    "Event",
    "Job",
    "Keys",
    "Limits",
    "Log",
    "Metrics",
    "Service",
    "create_app",
    "is_loopback",
    "serve",
]
