"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .answers import Answer
from .bodies import answer_json, body_schema, owner_of, read_body
from .jobs import Event
from .options import chat_logprob, chat_logprobs, choices_of, conversation, new_messages, usage
from .schemas import ChatRequest
from .service import Service
from .streams import EventStream, data, unless_left, until_saved


def chat_routes(service: Service) -> APIRouter:
    """The routes of chat."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation; with `session`, continue one that the server remembers."""
        owner = owner_of(request, service)
        body = await read_body(request, ChatRequest)
        answer = await begin_chat(service, owner, body)
        if body.stream:
            with_usage = body.session is not None or (
                (body.stream_options or False) and body.stream_options.include_usage
            )
            return EventStream(service, answer, lambda found: _chunks(service, found, bool(with_usage)))
        logprobs: dict[int, list[Any]] = {}
        if chat_logprobs(body) is not None:
            answer.on_event = lambda event: _collect(service, event, logprobs)
        await unless_left(request, service, answer)
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": {"content": logprobs.get(choice.index, []), "refusal": None} if logprobs else None,
                "finish_reason": choice.reason,
            }
            for choice in answer.choices
        ]
        if not choices:  # nothing was asked for: the texts are read
            message = {"role": "assistant", "content": "", "refusal": None}
            choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        whole = _head(service, "chat.completion") | {"choices": choices, "usage": usage(answer)}
        return answer_json(whole | ({} if answer.info is None else {"session": answer.info}))

    return router


async def begin_chat(service: Service, owner: str, body: ChatRequest) -> Answer:
    """Hand a request to the service."""
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    choices = choices_of(service, body, most, chat_logprobs(body))
    if body.session is None:
        ids = await service.in_files(conversation, service, body.messages)
        return await service.answer(owner, ids, choices)
    name = service.check_name(body.session)
    system, texts = new_messages(body.messages)
    return await service.answer_in_session(owner, name, texts, choices, memory=body.memory or "write", system=system)


def _head(service: Service, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": None,
    }


def _collect(service: Service, event: Event, logprobs: dict[int, list[Any]]) -> None:
    found = logprobs.setdefault(event.choice, [])
    if event.logprob is not None:
        found.append(chat_logprob(service, event.logprob))


async def _chunks(service: Service, answer: Answer, with_usage: bool) -> AsyncIterator[bytes]:
    head = _head(service, "chat.completion.chunk")

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return data(head | {"choices": [choice]} | ({"usage": None} if with_usage else {}))

    for i in range(max(1, len(answer.choices))):
        yield chunk(i, {"role": "assistant", "content": "", "refusal": None})
    async for event in until_saved(answer.stream(), []):
        logprobs = None
        if event.logprob is not None:
            logprobs = {"content": [chat_logprob(service, event.logprob)], "refusal": None}
        if event.text or logprobs:
            yield chunk(event.choice, {"content": event.text}, None, logprobs)
        if event.reason is not None:
            yield chunk(event.choice, {}, event.reason)
    if not answer.choices:
        yield chunk(0, {}, "length")
    if with_usage:
        end = head | {"choices": [], "usage": usage(answer)}
        yield data(end | ({} if answer.info is None else {"session": answer.info}))
    yield b"data: [DONE]\n\n"
