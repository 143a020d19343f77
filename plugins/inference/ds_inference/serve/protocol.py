"""Requests of OpenAI's protocol, read strictly: what is not known or cannot be done is refused by
its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_inference.serve.http.errors import Refusal

MOST_CHOICES = 64
"""Answers to one request: prompts times `n`."""

Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Stops = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """`include_obfuscation` is accepted; nothing is obfuscated here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Asked(_Strict):
    """The fields of both kinds of requests.

    `user`, `store`, `metadata` and the like are for OpenAI's accounts: accepted, without effect.
    """

    model: str
    # None throughout: not given, which OpenAI's clients also send as null.
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # top_k, min_p and repetition_penalty are not OpenAI's: vLLM and others have added them.
    top_k: Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stops | Annotated[list[Stops], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    def refused(self) -> None:
        """Refuse what this server does not do."""
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "`stream_options` needs `stream: true`", param="stream_options")

    def stops(self) -> list[str]:
        """The strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


Tokens = list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class CompletionRequest(Asked):
    """Of /v1/completions."""

    prompt: (
        str
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[str] | list[Tokens], Field(min_length=1)]
    )
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, always a list of them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def refused(self) -> None:
        """Refuse what this server does not do."""
        super().refused()
        if self.suffix:
            raise Refusal(
                400,
                "`suffix` is not supported: models continue a text here",
                "unsupported",
                "suffix",
            )
        if self.best_of not in (None, self.n or 1):
            raise Refusal(
                400,
                "`best_of` other than `n` is not supported; ask for `n`",
                "unsupported",
                "best_of",
            )
        if self.echo and self.logprobs is not None:
            raise Refusal(
                400, "`echo` with `logprobs` is not supported; leave one out", "unsupported", "echo"
            )
        if self.logit_bias:
            raise Refusal(400, "`logit_bias` is not supported", "unsupported", "logit_bias")
        if len(self.prompts()) * (self.n or 1) > MOST_CHOICES:
            raise Refusal(400, f"prompts times `n` may be {MOST_CHOICES} at most", param="prompt")


class Part(_Strict):
    """A piece of a message."""

    type: str
    text: str | None = None


class Message(_Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None
    refusal: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it; a developer's message is a system's, its older name."""
        if isinstance(self.content, str):
            text = self.content
        else:
            if any(part.type != "text" or part.text is None for part in self.content):
                raise Refusal(
                    400, "only parts of type text are supported", "unsupported", "messages"
                )
            text = "\n".join(part.text or "" for part in self.content)
        found = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return found | ({"name": self.name} if self.name is not None else {})


class Format(_Strict):
    """`response_format`."""

    # Only the type is looked at: whatever else a format has, it is refused by its type.
    model_config = ConfigDict(extra="ignore")

    type: str


class ChatRequest(Asked):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Format | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def refused(self) -> None:
        """Refuse what this server does not do."""
        super().refused()
        wrong = {
            "tools": bool(self.tools),
            "tool_choice": self.tool_choice not in (None, "none", "auto"),
            "logit_bias": bool(self.logit_bias),
            "response_format": self.response_format is not None
            and self.response_format.type != "text",
            "modalities": self.modalities not in (None, ["text"]),
        }
        for name, bad in wrong.items():
            if bad:
                raise Refusal(400, f"`{name}` is not supported", "unsupported", name)
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise Refusal(
                400,
                "`max_tokens` is the old name of `max_completion_tokens`; give one",
                param="max_tokens",
            )


T = TypeVar("T", ChatRequest, CompletionRequest)


def read(kind: type[T], body: bytes) -> T:
    """The request in `body`; Refusal (400) that names what is wrong with it, without repeating what
    it says.
    """
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        all_of_them = error.errors(include_input=False, include_url=False, include_context=False)
        # A union reports an error for each of its kinds: the deepest is of the kind that was meant.
        first = max(all_of_them, key=lambda e: len(e["loc"]))
        place = [str(part) for part in first["loc"]]
        if first["type"] == "json_invalid":
            raise Refusal(400, "the body is not JSON in UTF-8", "invalid_json") from None
        if first["type"] == "extra_forbidden":
            # Names are cut: an error must not be as long as the body.
            name = place[-1][:100]
            raise Refusal(400, f"unknown field {name!r}", "unknown_parameter", name) from None
        where = (
            ".".join(part for part in place if part in kind.model_fields or part.isdigit()) or None
        )
        named = f"`{where}`: " if where else "the body: "
        raise Refusal(400, f"{named}{first['msg'][:200]}", "invalid_value", where) from None
    asked.refused()
    return asked
