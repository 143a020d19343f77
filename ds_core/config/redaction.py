"""Keeping secrets out of sight: which key names are secret, and plain data with the secrets replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

__all__ = ["REDACTED", "is_secret_name", "redact", "scrub"]

REDACTED = "***"

_ALONE = {"token", "password", "passwd", "pwd", "passphrase", "secret", "secrets", "apikey", "authorization", "auth"}
_ALONE |= {"credential", "credentials", "bearer", "cookie"}
_ANYWHERE = {"secret", "password", "passwd", "passphrase", "credential", "credentials", "authorization", "apikey"}
_KEY_OF = {"api", "private", "access", "secret", "account", "signing", "encryption", "ssh", "auth", "license"}
_TOKEN_OF = {"api", "access", "auth", "hf", "refresh", "session", "bearer", "id", "security"}
# Words of language models, not of log-ins: max_token, pad_token, ...
_TEXT_TOKEN = {"max", "min", "num", "pad", "eos", "bos", "unk", "sep", "mask", "cls", "per", "special", "image", "new"}
_URL_LOGIN = re.compile(r"(\w+://)[^/\s@\"']+@")


def is_secret_name(name: str) -> bool:
    """Whether a key of this name usually holds a secret: api_key, hf_token, PASSWORD, clientSecret, ...

    ``max_tokens``, ``pad_token`` and ``token_type`` are not.
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    parts = [p for p in re.split(r"[^a-z0-9]+", snake) if p]
    if not parts:
        return False
    last, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if last in ("token", "tokens"):
        return before not in _TEXT_TOKEN if last == "token" else before in _TOKEN_OF
    if last in ("key", "keys"):
        return before in _KEY_OF
    return last in _ALONE or bool(_ANYWHERE & set(parts[:-1]) and last not in ("enabled", "type", "required"))


def redact(value: Any) -> Any:
    """A copy of plain data in which every value under a secret name is ``***``, at any depth.

    A secret key whose value is null stays null: it hides nothing. Log-ins inside URLs are hidden too.
    """
    if isinstance(value, dict):
        return {k: REDACTED if v is not None and is_secret_name(str(k)) else redact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redact(v) for v in value) if type(value) in (list, tuple) else value
    return _URL_LOGIN.sub(rf"\1{REDACTED}@", value) if type(value) is str and "://" in value else value


def scrub(text: str, secrets: Iterable[str]) -> str:
    """`text` with every known secret string replaced (for messages written by others' validators)."""
    for item in sorted(secrets, key=len, reverse=True):
        if len(item) > 2:  # shorter ones would blot out ordinary words
            text = text.replace(item, REDACTED)
    return text
