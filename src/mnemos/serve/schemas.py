"""The bodies of requests. Fields of OpenAI's API that would change an answer and are not supported are refused, unknown ones too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..sessions.record import MAX_TITLE
from ..sessions.turn import Memory
from .errors import ApiError, encode

MAX_STOPS = 16
MAX_MESSAGES = 65536
SEED = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern="^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
Nothing = Literal[None]
Ignored = Any  # accepted, and without effect


def _answerable(value: Any) -> Any:
    """A value that can be a part of a JSON answer: without NaN and Infinity, which the parser takes."""
    encode(value)
    return value


Echoed = Annotated[Any, AfterValidator(_answerable)]


class Body(BaseModel):
    """A JSON object with known fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Part(Body):
    """A part of a message: only text is read."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = Field(None, max_length=64)
    refusal: Nothing = None
    id: str | None = None
    status: str | None = None
    type: Literal["message"] | None = None

    @property
    def text(self) -> str:
        """The text of all parts."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def speaker(self) -> str:
        return "system" if self.role == "developer" else self.role


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Ignored = None


class Common(Body):
    """Fields that all endpoints have."""

    model: str = Field("", max_length=256)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    session: Name | None = Field(None, description="name of a session, which is created if there is none")
    memory: Memory | None = Field(None, description='"write" (default), "read": does not write, "off": an empty state')
    user: Ignored = None
    metadata: Echoed = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


class Chosen(Common):
    """Fields of chat and completions."""

    top_k: int | None = Field(None, ge=0, lt=2**31)
    seed: SEED | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = Field(None, ge=1, le=128)
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class TextFormat(Body):
    type: Literal["text"]


class ChatRequest(Chosen):
    """`POST /v1/chat/completions`. With `session`, messages are only the new ones."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    store: Ignored = None
    reasoning_effort: Ignored = None
    parallel_tool_calls: Ignored = None
    verbosity: Ignored = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Chosen):
    """`POST /v1/completions`. Prompts are texts or token ids."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(union_mode="left_to_right")
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Nothing = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Ignored = None


class ResponsesRequest(Common):
    """`POST /v1/responses`. A response is continued by its id."""

    input: str | Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = None
    seed: SEED | None = None
    stream_options: Ignored = None
    text: TextOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Ignored = None
    reasoning: Ignored = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    background: Literal[False] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


class SessionChange(Body):
    """`PATCH /v1/sessions/{id}`."""

    title: str | None = Field(None, max_length=MAX_TITLE)
    id: Name | None = None


class ForkRequest(Body):
    """`POST /v1/sessions/{id}/fork`."""

    id: Name | None = None


REQUESTS: tuple[type[Body], ...] = (ChatRequest, CompletionRequest, ResponsesRequest, SessionChange, ForkRequest)


def parse(kind: type[Body], body: bytes) -> Any:
    """The object of a body. Raises an `ApiError` of one sentence for the first wrong field.

    >>> parse(SessionChange, b'{"title": "lamp"}').title
    'lamp'
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"])[:200]
        if first["type"] == "json_invalid":
            raise ApiError(400, "the body is not valid JSON", "invalid_json") from None
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"{param} is unknown: remove it", "unknown_field", param) from None
        raise ApiError(400, f"{param or 'the body'} cannot be used: {first['msg']}", "invalid_value", param) from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", "invalid_json") from None
