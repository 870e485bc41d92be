"""`create_app`: the application of a service, with its description."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .bodies import answer_json
from .chat_routes import chat_routes
from .completion_routes import completion_routes
from .errors import ApiError, api_error
from .guard import App, Guard
from .response_routes import response_routes
from .schemas import REQUESTS
from .service import Service
from .session_routes import session_routes
from .system_routes import system_routes

STATUS = {404: "there is no such page", 405: "this address does not take this method"}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def create_app(service: Service, *, is_local: bool = True) -> App:
    """The ASGI application. is_local: only requests whose Host header names this machine are answered.

    >>> import tempfile
    >>> from mnemos.data import open_tokenizer
    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> from mnemos.sessions import SessionStore
    >>> model = MnemosForCausalLM(presets.config("deltanet", "nano")).eval()
    >>> app = create_app(Service(model, open_tokenizer("bytes"), SessionStore(tempfile.mkdtemp())))
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await service.start()
        yield
        await service.stop()

    api = FastAPI(
        title="Mnemos",
        description="OpenAI's interface, and sessions whose memory lasts.",
        lifespan=lifespan,
        docs_url=None,  # its page would load scripts from the network
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(Exception, _server_error)
    for routes in (system_routes, session_routes, chat_routes, completion_routes, response_routes):
        api.include_router(routes(service))
    api.openapi = lambda: _openapi(api, service)
    return Guard(api, service, is_local)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return answer_json(error.body(), error.status, error.headers())


async def _http_error(_: Request, error: Exception) -> Response:
    """Errors of the router."""
    assert isinstance(error, HTTPException)
    wrong = ApiError(error.status_code, STATUS.get(error.status_code, "the request cannot be answered"))
    return answer_json(wrong.body(), wrong.status, dict(error.headers or {}))


async def _server_error(_: Request, error: Exception) -> Response:
    """Any other error, which the guard logs."""
    wrong = api_error(RuntimeError())
    return answer_json(wrong.body(), wrong.status)


def _openapi(api: FastAPI, service: Service) -> dict[str, Any]:
    """The description, with the bodies of requests and the form of errors."""
    if api.openapi_schema is None:
        found = FastAPI.openapi(api)
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        for kind in REQUESTS:
            own = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= own.pop("$defs", {})
            schemas[kind.__name__] = own
        schemas["Error"] = ERROR_SCHEMA
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        if service.keys:
            found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            found["security"] = [{"key": []}]
        for path, methods in found["paths"].items():
            for method, about in methods.items():
                _describe(path, method, about)
        api.openapi_schema = found
    return api.openapi_schema


def _describe(path: str, method: str, about: dict[str, Any]) -> None:
    """Complete the description of one route."""
    error = {
        "description": "one sentence",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    about["responses"].pop("422", None)
    about["responses"]["4XX"] = about["responses"]["5XX"] = error
    if about.pop("x-optional-body", False):
        about["requestBody"]["required"] = False
    if path.endswith("/import"):
        about["requestBody"] = {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    if path.endswith(("/import", "/fork")) and "200" in about["responses"]:
        about["responses"]["201"] = about["responses"].pop("200")
    if path.startswith(("/v1/sessions/{name}", "/v1/responses/{")):
        for parameter in about.get("parameters", []):
            parameter["schema"] |= {"minLength": 1, "maxLength": 128}
