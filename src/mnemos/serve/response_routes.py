"""`POST /v1/responses`, and reading and deleting stored responses.

A stored response is a session of its own: a response that continues it begins with its state, so nothing is read again, and each
response can be continued any number of times.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .answers import Answer
from .bodies import answer_json, body_schema, owner_of, read_body
from .errors import ApiError
from .options import choices_of, new_messages
from .schemas import Message, ResponsesRequest
from .service import RESPONSE, Service, new_response_name
from .streams import EventStream, named, unless_left, until_saved


def response_routes(service: Service) -> APIRouter:
    """The routes of responses."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        """Answer, and keep the state under the id of the response unless `store` is false."""
        owner = owner_of(request, service)
        body = await read_body(request, ResponsesRequest)
        name = new_response_name()
        answer = await _begin(service, owner, body, name)
        if body.stream:
            return EventStream(service, answer, lambda found: _events(service, body, name, found))
        await unless_left(request, service, answer)
        return answer_json(_response(service, body, name, answer, "completed"))

    @router.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        """A stored response."""
        owner = owner_of(request, service)
        _check_id(response_id)
        info = await service.in_files(service.store.info, response_id, owner)
        turns = await service.in_files(service.store.turns, response_id, owner)
        text = next((turn["content"] for turn in reversed(turns) if turn["role"] == "assistant"), "")
        found = {"id": response_id, "object": "response", "created_at": int(info.created), "status": "completed"}
        return answer_json(found | {"model": service.name, "output": [_message(response_id, text, "completed")]})

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a stored response. Those that continue it stay."""
        owner = owner_of(request, service)
        _check_id(response_id)
        with service.claims.hold(owner, [response_id]):
            await service.in_files(service.store.delete, response_id, owner)
            service.warm.drop(owner, response_id)
        return answer_json({"id": response_id, "object": "response", "deleted": True})

    return router


def _check_id(name: str) -> None:
    word = name.removeprefix(RESPONSE)
    if word == name or len(word) != 32 or not all(letter in "0123456789abcdef" for letter in word):
        raise ApiError(404, f"there is no response {name!r:.60}", "response_not_found")


async def _begin(service: Service, owner: str, body: ResponsesRequest, name: str) -> Answer:
    choices = choices_of(service, body, body.max_output_tokens, None)
    messages = [Message(role="user", content=body.input)] if isinstance(body.input, str) else list(body.input)
    if body.instructions:
        messages.insert(0, Message(role="system", content=body.instructions))
    if body.session is not None:
        if body.previous_response_id is not None:
            raise ApiError(400, "give session or previous_response_id, not both", "invalid_value", "session")
        session = service.check_name(body.session)
        system, texts = new_messages(messages)
        return await service.answer_in_session(
            owner, session, texts, choices, memory=body.memory or "write", system=system
        )
    if body.previous_response_id is None and any(message.speaker == "assistant" for message in messages):
        raise ApiError(
            400,
            "input may not have texts of the assistant: continue a response by previous_response_id",
            "invalid_value",
            "input",
        )
    system, texts = new_messages(messages)
    if body.previous_response_id is not None:
        _check_id(body.previous_response_id)
    return await service.answer_in_session(
        owner, name, texts, choices, system=system, source=body.previous_response_id, is_stored=body.store is not False
    )


def _message(name: str, text: str, status: str) -> dict[str, Any]:
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{name.removeprefix(RESPONSE)}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [content],
    }


def _response(service: Service, body: ResponsesRequest, name: str, answer: Answer, status: str) -> dict[str, Any]:
    is_own = answer.session is not None and body.session is None  # stored under its id
    created = answer.session.record.created if is_own else answer.created
    is_done = status == "completed"
    is_cut = is_done and any(choice.reason == "length" for choice in answer.choices)
    status = "incomplete" if is_cut else status
    text = "".join(choice.text for choice in answer.choices)
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached, "cache_write_tokens": 0},
        "output_tokens": answer.generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.generated,
    }
    found = {
        "id": name,
        "object": "response",
        "created_at": int(created),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata if isinstance(body.metadata, dict) else {},
        "model": service.name,
        "output": [_message(name, text, status)] if is_done else [],
        "parallel_tool_calls": False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False and body.session is None,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": usage if is_done else None,
    }
    if is_done and body.session is not None:
        found["session"] = answer.info
    return found


async def _events(service: Service, body: ResponsesRequest, name: str, answer: Answer) -> AsyncIterator[bytes]:
    number = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return named({"type": f"response.{kind}", "sequence_number": number} | fields)

    begun = _response(service, body, name, answer, "in_progress")
    item = _message(name, "", "in_progress") | {"content": []}
    where = {"item_id": f"msg_{name.removeprefix(RESPONSE)}", "output_index": 0, "content_index": 0}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    yield event("output_item.added", output_index=0, item=item)
    yield event(
        "content_part.added", **where, part={"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    )
    try:
        async for found in until_saved(answer.stream(), []):
            if found.text:
                yield event("output_text.delta", **where, delta=found.text, logprobs=[], obfuscation="")
    except ApiError as error:
        failed = {"status": "failed", "error": {"code": error.code or "server_error", "message": error.message}}
        yield event("failed", response=begun | failed)
        return
    whole = _response(service, body, name, answer, "completed")
    message = whole["output"][0]
    yield event("output_text.done", **where, text=message["content"][0]["text"], logprobs=[])
    yield event("content_part.done", **where, part=message["content"][0])
    yield event("output_item.done", output_index=0, item=message)
    yield event("incomplete" if whole["status"] == "incomplete" else "completed", response=whole)
