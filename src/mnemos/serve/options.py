"""From requests of OpenAI's API to options of the service, and from answers to usage."""

from __future__ import annotations

from typing import Any

from .answers import Answer
from .errors import ApiError
from .jobs import Choice, TokenLogprob
from .schemas import ChatRequest, Chosen, CompletionRequest, Message, ResponsesRequest
from .service import Service

DEFAULT_TOKENS = 256
DEFAULT_COMPLETION = 16  # as OpenAI's


def choices_of(
    service: Service, body: Chosen | ResponsesRequest, max_tokens: int | None, logprobs: int | None
) -> list[Choice]:
    """The answers that a request asks for."""
    if body.model and body.model != service.name:
        raise ApiError(
            404, f"the model {body.model!r:.100} does not exist: it is {service.name!r}", "model_not_found", "model"
        )
    default = DEFAULT_COMPLETION if isinstance(body, CompletionRequest) else DEFAULT_TOKENS
    options: dict[str, Any] = {
        "max_new_tokens": min(default, service.limits.max_tokens) if max_tokens is None else max_tokens,
        "temperature": 1.0 if body.temperature is None else float(body.temperature),
        "top_p": 1.0 if body.top_p is None else float(body.top_p),
        "seed": None if body.seed is None else body.seed % 2**63,
    }
    n = 1
    if isinstance(body, Chosen):
        stop = body.stop or []
        options |= {"stop": (stop,) if isinstance(stop, str) else tuple(stop), "top_k": body.top_k or 0}
        n = body.n or 1
    if n > service.limits.max_choices:
        raise ApiError(
            400, f"n={n} is more than the {service.limits.max_choices} answers of one request", "too_many_choices", "n"
        )
    if n > 1 and body.session is not None:
        raise ApiError(400, "a session continues with one answer: n must be 1", "invalid_value", "n")
    if body.memory is not None and body.session is None:
        raise ApiError(400, "memory needs a session: give one, or leave memory out", "invalid_value", "memory")
    return service.make_choices(options, n, logprobs)


def new_messages(messages: list[Message]) -> tuple[str | None, list[str]]:
    """The system prompt and the texts of the user that a turn of a session adds."""
    system, texts = None, []
    for i, message in enumerate(messages):
        if message.speaker == "system" and i == 0:
            system = message.text
        elif message.speaker == "user":
            texts.append(message.text)
        else:
            raise ApiError(
                400,
                "with a session, messages are only the new ones: a system prompt at the very beginning, and texts of the user",
                "invalid_value",
                "messages",
            )
    if not texts:
        raise ApiError(400, "messages need at least one text of the user", "invalid_value", "messages")
    return system, texts


def conversation(service: Service, messages: list[Message]) -> list[int]:
    """Tokens of a whole conversation without session."""
    try:
        ids = service.dialogue.whole([(message.speaker, message.text) for message in messages])
    except ValueError as wrong:
        raise ApiError(400, str(wrong), "invalid_value", "messages") from None
    if not ids:
        raise ApiError(400, "messages have no token: give at least one character", "invalid_value", "messages")
    return ids


def chat_logprobs(body: ChatRequest) -> int | None:
    """The number of likeliest tokens to report; None if none is asked for."""
    if not body.logprobs:
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "invalid_value", "top_logprobs")
        return None
    return body.top_logprobs or 0


def usage(answer: Answer) -> dict[str, Any]:
    """Tokens read and generated."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.generated,
        "total_tokens": answer.prompt_tokens + answer.generated,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def joined_usage(answers: list[Answer]) -> dict[str, Any]:
    """The sum over the prompts of a request."""
    parts = [usage(answer) for answer in answers]
    total: dict[str, Any] = {
        name: sum(part[name] for part in parts) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    cached = sum(answer.cached for answer in answers)
    return total | {"prompt_tokens_details": {"cached_tokens": cached}}


def token_text(service: Service, token: int) -> str:
    return service.dialogue.decode([token])


def chat_logprob(service: Service, found: TokenLogprob) -> dict[str, Any]:
    """A token as `choices[].logprobs.content` has it."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(service, token)
        return {"token": text, "logprob": max(-9999.0, logprob), "bytes": list(text.encode(errors="replace"))}

    top = [entry(token, logprob) for token, logprob in found.top]
    return entry(found.token, found.logprob) | {"top_logprobs": top}
