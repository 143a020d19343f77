"""Keeping secrets out of sight: which keys are secret, data and texts without them, and how
messages show a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_core.errors import nearest

REDACTED = "***"

_WORDS: Mapping[str, Sequence[str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)
"""What names of secrets are made of: words that are secret ``alone``, as the last of a name, or
``anywhere`` in it; whose ``key`` or ``token`` is one. Those of ``text_token`` are words of language
models, not of log-ins (max_token, pad_token). An unknown key is compared with ``likely`` ones."""
_URL_LOGIN = re.compile(r"(\w+://)[^/\s@\"']+@")


def is_secret_name(name: str) -> bool:
    """Whether a key of this name usually holds a secret: api_key, hf_token, PASSWORD, clientSecret,
    ...

    ``max_tokens``, ``pad_token`` and ``token_type`` are not.
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    parts = [p for p in re.split(r"[^a-z0-9]+", snake) if p]
    if not parts:
        return False
    last = parts[-1]
    before = parts[-2] if len(parts) > 1 else ""
    if last in ("token", "tokens"):
        # One token is a secret unless a tokenizer's; several are a count unless said to be secret.
        if last == "token":
            return before not in _WORDS["text_token"]
        return before in _WORDS["token_of"]
    if last in ("key", "keys"):
        return before in _WORDS["key_of"]
    if last in ("enabled", "type", "required"):  # of a secret, and none itself
        return False
    return last in _WORDS["alone"] or not set(parts[:-1]).isdisjoint(_WORDS["anywhere"])


def redact(
    value: Any, marked: Collection[str] = (), hide: Callable[[Any], str] = lambda _: REDACTED
) -> Any:
    """A copy of plain data in which every value under a secret name is ``***``, at any depth.

    marked: more names that are secret.
    hide: what is shown for a secret.

    A secret key whose value is null stays: it hides nothing. Log-ins inside URLs are hidden too.
    """
    if isinstance(value, dict):
        return {
            k: hide(v)
            if v is not None and (k in marked or is_secret_name(str(k)))
            else redact(v, marked, hide)
            for k, v in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(redact(v, marked, hide) for v in value)
    return (
        _URL_LOGIN.sub(rf"\1{REDACTED}@", value) if type(value) is str and "://" in value else value
    )


def secrets_in(data: Any, marked: Collection[str] = ()) -> set[str]:
    """Every text below `data` that stands under a secret key: what no message may contain."""
    found: set[str] = set()

    def collect(value: Any) -> str:
        for item in (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, (list, tuple))
            else ()
        ):
            collect(item)
        if not isinstance(value, (dict, list, tuple, bool, type(None))):
            found.add(str(value))
        return REDACTED

    redact(data, marked, collect)
    return found


def scrub(text: str, secrets: Iterable[str]) -> str:
    """`text` with every known secret string replaced (for messages written by others'
    validators)."""
    for item in sorted(secrets, key=len, reverse=True):
        if len(item) > 2:  # shorter ones would blot out ordinary words
            text = text.replace(item, REDACTED)
    return text


def show(value: Any) -> str:
    """A value as JSON, secrets redacted, cut to 60 characters."""
    try:
        text = json.dumps(redact(value), ensure_ascii=False)
    except (TypeError, ValueError):
        text = type(value).__name__
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:56] + " ..."


def show_unknown(key: str, value: Any, close: str | None = None) -> str:
    """The value of an unknown key, unless the key looks like a secret's, or like the misspelt name
    of one.
    """
    secret = (
        is_secret_name(key)
        or (close is not None and is_secret_name(close))
        or nearest(key, _WORDS["likely"]) is not None
    )
    return REDACTED if secret and value is not None else show(value)
