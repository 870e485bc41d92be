"""Reading requests and writing answers, common to all routes."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError, encode
from .keys import OPERATOR
from .schemas import Body, parse
from .service import Service

Kind = TypeVar("Kind", bound=Body)
JSON = "application/json"


def owner_of(request: Request, service: Service) -> str:
    """The owner whose key the request has. Raises an `ApiError` if it has none."""
    owner = service.keys.owner(request.headers.get("authorization"))
    if owner is None:
        raise ApiError(401, "the request needs a valid key: Authorization: Bearer KEY", "invalid_api_key")
    if owner == OPERATOR:
        raise ApiError(403, "this key reads /metrics only", "wrong_key")
    return owner


async def read_body(request: Request, kind: type[Kind], is_optional: bool = False) -> Kind:
    """The object in the body of a request."""
    body = await request.body()
    if is_optional and not body:
        return kind()
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, f"the body must have Content-Type: {JSON}", "wrong_content_type")
    return parse(kind, body)


def answer_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(encode(value), status, {"cache-control": "no-store"} | (headers or {}), JSON)


def body_schema(kind: type[Body]) -> dict[str, Any]:
    """The part of the OpenAPI description that names the body of a route."""
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}
