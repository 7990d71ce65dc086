"""What clients send. Fields that nobody here knows are ignored and named in the `warning` header; what is known and wrong is 400."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from ..errors import needs_extra

with needs_extra("serve"):
    from pydantic import BaseModel, ConfigDict, Field

LONGEST_NAME = 512
Text = Annotated[str, Field(max_length=1 << 22)]
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Seed = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Stop = str | Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=16)]
PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,40}")
SILENT = frozenset({"metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"})
"""Sent by clients as a matter of course, without meaning here and without harm: not worth a warning."""


class Body(BaseModel):
    """Of a request: numbers are finite, types are what they say, and more may be there."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @property
    def unknown(self) -> list[str]:
        return sorted(set(self.model_extra or {}) - SILENT)

    def warning(self) -> dict[str, str]:
        """The header that names what was ignored; only names that can do no harm in one."""
        if not self.unknown:
            return {}
        shown = [n for n in self.unknown if PLAIN.fullmatch(n)][:8]
        more = len(self.unknown) - len(shown)
        return {"warning": f'299 regard "ignored: {", ".join([*shown, *([f"{more} more"] if more else [])])}"'}


class Part(Body):
    """Of a message's content."""

    type: str = Field(max_length=64)
    text: Text | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Part] | None = None
    tool_calls: list[Any] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None


class Choosing(Body):
    """Who answers."""

    model: Name | None = None
    identity: Name | None = None
    """Somebody's name; `model="base:name"` and the header X-Regard-Identity say the same."""
    remember: bool | None = None
    """False reads without writing; by default a finished turn with a person is imprinted."""
    source: Annotated[str, Field(max_length=200)] | None = None
    """What to forget this turn by; by default the day and the beginning of the conversation."""


class Drawing(Choosing):
    """How tokens are drawn."""

    temperature: float | None = Field(None, ge=0, le=2)
    """0 takes the most likely token, and is the default; 1 where top_p, top_k, min_p or n ask for chance."""
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    seed: Seed | None = None
    stop: Stop | None = None
    n: int | None = Field(None, ge=1, le=1 << 31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Drawing):
    messages: list[Message] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None


class CompletionRequest(Drawing):
    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = Field(None, ge=0, le=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=1 << 31)


class EmbeddingRequest(Body):
    model: Name | None = None
    input: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=1 << 31)
    user: str | None = None


class TokenizeRequest(Body):
    model: Name | None = None
    prompt: Text | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """By default for a prompt, and not for messages, whose template writes them."""
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: list[TokenId]


class ResponseRequest(Choosing):
    input: Text | list[dict[str, Any]]
    instructions: Text | None = None
    previous_response_id: Name | None = None
    conversation: Any = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: Seed | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    tools: list[Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None


__all__ = [
    "Body", "ChatRequest", "Choosing", "CompletionRequest", "DetokenizeRequest", "Drawing", "EmbeddingRequest", "Message", "Part", "ResponseRequest",
    "TokenizeRequest",
]  # fmt: skip
