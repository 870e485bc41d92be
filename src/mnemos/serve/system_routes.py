"""The page, health, metrics, models and the description of the server."""

from __future__ import annotations

from importlib import metadata, resources
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..models.mixer import BLOCKS
from .bodies import answer_json, owner_of
from .errors import ApiError
from .keys import OPERATOR
from .service import Service

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


def page_files() -> dict[str, tuple[bytes, str]]:
    """Contents and type of each file of the page, by name: a fixed list, made when the server starts."""
    found = {}
    for file in resources.files(__package__ or "mnemos.serve").joinpath("page").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in TYPES and file.is_file():
            found[file.name] = file.read_bytes(), TYPES[suffix]
    return found


def system_routes(service: Service) -> APIRouter:
    """The routes that are not about conversations."""
    router = APIRouter(tags=["server"])
    files = page_files()

    def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, "there is no such file", "not_found")
        contents, kind = files[name]
        return Response(contents, 200, {"cache-control": "no-cache", "content-type": kind})

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return file(INDEX)

    @router.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return file(name)

    @router.get("/health")
    async def health() -> Response:
        """Whether the server answers requests."""
        if service.is_draining:
            raise ApiError(503, "the server is shutting down", "shutting_down")
        if not service.engine.is_healthy:
            raise ApiError(503, "the engine has stopped: restart the server", "unhealthy")
        return answer_json({"status": "ok"})

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics in Prometheus' text format. With keys, only the key of the name metrics reads them."""
        if service.keys and service.keys.owner(request.headers.get("authorization")) != OPERATOR:
            raise ApiError(401, f"only the key named {OPERATOR} in the file of keys reads /metrics", "invalid_api_key")
        return Response(service.metrics.text(), 200, {"cache-control": "no-store"}, "text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        """The one model of this server."""
        owner_of(request, service)
        return answer_json({"object": "list", "data": [_model(service)]})

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        """The model of this name."""
        owner_of(request, service)
        if name != service.name:
            raise ApiError(404, f"the model {name!r:.100} does not exist: it is {service.name!r}", "model_not_found")
        return answer_json(_model(service))

    @router.get("/v1/info")
    async def info(request: Request) -> Response:
        """What the server can do, and its limits."""
        owner_of(request, service)
        return answer_json(_info(service))

    return router


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "mnemos"}


def _info(service: Service) -> dict[str, Any]:
    model, limits, store = service.model, service.limits, service.store
    return {
        "version": metadata.version("mnemos"),
        "model": service.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": {"window": _window(model)},
        "has_memory": service.has_memory,
        "limits": {
            "max_tokens": limits.max_tokens,
            "body_bytes": limits.max_body_bytes,
            "prompt_tokens": limits.max_prompt_tokens,
            "import_bytes": limits.max_import_bytes,
            "choices": limits.max_choices,
        },
        "quota": {"sessions": store.max_sessions, "bytes": store.max_bytes},
        "ttl": store.ttl,
        "needs_key": bool(service.keys),
    }


def _window(model: Any) -> int | None:
    """The tokens that attention reaches; None if it has no limit, or the model has no attention."""
    attached = getattr(model, "attach_config", None)
    if attached is not None:
        return attached.window
    config = model.config
    spans = [BLOCKS[name].attention_span(config) for name in config.blocks if BLOCKS[name].has_attention]
    limited = [span for span in spans if span is not None]
    return max(limited) if limited and len(limited) == len(spans) else None
