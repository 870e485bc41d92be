"""`POST /v1/completions`."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .answers import Answer
from .bodies import answer_json, body_schema, owner_of, read_body
from .errors import ApiError
from .jobs import TokenLogprob
from .options import choices_of, joined_usage, token_text
from .schemas import CompletionRequest
from .service import Service
from .streams import EventStream, data, unless_left, until_saved


def completion_routes(service: Service) -> APIRouter:
    """The routes of completions."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue texts; with `session`, a text is read behind what the session has read, without chat template."""
        owner = owner_of(request, service)
        body = await read_body(request, CompletionRequest)
        prompts = _prompts(body)
        n = body.n or 1
        if len(prompts) * n > service.limits.max_choices:
            raise ApiError(
                400, f"one request has at most {service.limits.max_choices} answers", "too_many_choices", "prompt"
            )
        if len(prompts) > 1 and (body.stream or body.session is not None):
            raise ApiError(400, "a stream and a session have one prompt", "invalid_value", "prompt")
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo and logprobs do not go together", "invalid_value", "echo")
        if body.stream:
            answer = await _begin(service, owner, body, prompts[0])
            include = body.session is not None or bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(service, answer, lambda found: _chunks(service, body, found, include))
        choices: list[dict[str, Any]] = []
        answers = []
        for prompt in prompts:
            answer = await _begin(service, owner, body, prompt)
            collected: dict[int, list[TokenLogprob]] = {}
            if body.logprobs is not None:
                answer.on_event = lambda event, collected=collected: (
                    collected.setdefault(event.choice, []).append(event.logprob) if event.logprob else None
                )
            await unless_left(request, service, answer)
            answers.append(answer)
            before = _echoed(service, body, prompt)
            for choice in answer.choices:
                logprobs = None if body.logprobs is None else _logprobs(service, collected.get(choice.index, []))
                found = {"index": len(choices), "text": before + choice.text, "logprobs": logprobs}
                choices.append(found | {"finish_reason": choice.reason})
            if not answer.choices:
                choices.append({"index": len(choices), "text": before, "logprobs": None, "finish_reason": "length"})
        whole = _head(service) | {"choices": choices, "usage": joined_usage(answers)}
        info = answers[0].info
        return answer_json(whole | ({} if info is None else {"session": info}))

    return router


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty: give a text or token ids", "invalid_value", "prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


async def _begin(service: Service, owner: str, body: CompletionRequest, prompt: str | list[int]) -> Answer:
    choices = choices_of(service, body, body.max_tokens, body.logprobs)
    if body.session is not None:
        if not isinstance(prompt, str):
            raise ApiError(400, "a session reads texts, not token ids", "invalid_value", "prompt")
        name = service.check_name(body.session)
        return await service.answer_in_session(
            owner, name, [prompt], choices, memory=body.memory or "write", is_plain=True
        )
    ids = await service.in_files(_ids, service, prompt)
    return await service.answer(owner, ids, choices)


def _ids(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        ids = service.dialogue.plain(prompt, is_first=True)
    else:
        ids, most = prompt, service.model.get_input_embeddings().weight.shape[0]
        if any(not 0 <= token < most for token in ids):
            raise ApiError(400, f"the tokens of prompt must be from 0 to {most - 1}", "invalid_value", "prompt")
    if not ids:
        raise ApiError(400, "prompt has no token: give at least one character", "invalid_value", "prompt")
    return ids


def _echoed(service: Service, body: CompletionRequest, prompt: str | list[int]) -> str:
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else service.dialogue.decode(prompt)


def _head(service: Service) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": None,
    }


def _logprobs(service: Service, found: list[TokenLogprob], start: int = 0) -> dict[str, Any]:
    """Log-probabilities as completions have them. start: characters of the tokens before."""
    texts = [token_text(service, entry.token) for entry in found]
    top = [{token_text(service, token): max(-9999.0, lp) for token, lp in entry.top} for entry in found]
    offsets = [*itertools.accumulate(map(len, texts), initial=start)][: len(texts)]
    return {
        "tokens": texts,
        "token_logprobs": [max(-9999.0, entry.logprob) for entry in found],
        "top_logprobs": top,
        "text_offset": offsets,
    }


async def _chunks(service: Service, body: CompletionRequest, answer: Answer, with_usage: bool) -> AsyncIterator[bytes]:
    head = _head(service)

    def chunk(index: int, text: str, reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return data(head | {"choices": [choice]} | ({"usage": None} if with_usage else {}))

    before = _echoed(service, body, _prompts(body)[0])
    if before:
        for i in range(max(1, len(answer.choices))):
            yield chunk(i, before)
    starts: dict[int, int] = {}
    async for event in until_saved(answer.stream(), []):
        logprobs = None
        if event.logprob is not None:
            start = starts.get(event.choice, 0)
            logprobs = _logprobs(service, [event.logprob], start)
            starts[event.choice] = start + len(logprobs["tokens"][0])
        if event.text or logprobs:
            yield chunk(event.choice, event.text, None, logprobs)
        if event.reason is not None:
            yield chunk(event.choice, "", event.reason)
    if not answer.choices:
        yield chunk(0, "", "length")
    if with_usage:
        end = head | {"choices": [], "usage": joined_usage([answer])}
        yield data(end | ({} if answer.info is None else {"session": answer.info}))
    yield b"data: [DONE]\n\n"
