"""Running the application: uvicorn, signals, and the order of shutting down."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import signal
import socket
import sys
from types import FrameType

import uvicorn

from .app import create_app
from .guard import App
from .service import Service

SWITCH_SECONDS = 0.0005  # the engine's thread waits at most so long for Python's lock
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 64 * 2**10


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Server(uvicorn.Server):
    """uvicorn's server: at the first signal, new requests get 503 and running answers are finished."""

    service: Service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.is_draining = True
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def make_config(app: App, grace: float) -> uvicorn.Config:
    """The options of uvicorn. grace: seconds for running answers at shutdown."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, int(grace)),
        http="h11",  # the other one, httptools, has no limit of headers
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


def serve(service: Service, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Answer requests until SIGTERM or SIGINT. Port 0 takes any free port, which is printed."""
    sys.setswitchinterval(SWITCH_SECONDS)
    _keep_freed_memory()
    listener = _listen(host, port)
    is_local = is_loopback(host) and not service.keys
    server = Server(make_config(create_app(service, is_local=is_local), service.limits.grace_seconds))
    server.service = service
    shown = f"[{host}]" if ":" in host else host
    print(f"{service.name} at http://{shown}:{listener.getsockname()[1]}/", flush=True)
    service.log.event("started", model=service.name, port=listener.getsockname()[1])
    try:
        asyncio.run(server.serve([listener]))
    finally:
        listener.close()
        service.log.event("stopped")


def _keep_freed_memory() -> None:
    """Let glibc reuse the memory of states, which come and go with every answer, instead of returning it: pages are slow to get."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # by the protocol, asyncio sets TCP_NODELAY
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(2048)
    except OSError as wrong:
        listener.close()
        reason = wrong.strerror or str(wrong)
        raise ValueError(f"port {port} of {host} cannot be used: {reason}; choose another --port") from None
    return listener
