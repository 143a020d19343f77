"""Text that may be shown to strangers: without secrets, log-ins and the name of the user
(torch-free).

[Note: by name, and then everywhere] What a name marks as a secret (an environment variable, a key
of the config) is found first; then its value is taken out of the whole text, wherever it stands: a
traceback, a command line, a path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ds_core.config.redaction import REDACTED, is_secret_name, redact, scrub

_NAME = re.compile(r"[A-Za-z][\w.-]*")
_VALUE = re.compile(r"""(["']?\s*[=:]\s*["']?)([^\s"',;&}{)(\]]+)""")
_NEXT_WORD = re.compile(r"""(\s+["']?)([^\s"']+)""")
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
# How the tokens of well-known services begin; their names may be anything.
_TOKENS = re.compile(
    r"\b(?:hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{12,}|ASIA[0-9A-Z]{12,}|AIza[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL
)


def secret_values(environment: Mapping[str, str]) -> set[str]:
    """The values of variables whose names say that they are secret, and the log-ins of URLs in
    any."""
    found = {value for name, value in environment.items() if is_secret_name(name)}
    for value in environment.values():
        logins = re.findall(r"\w+://([^/\s@\"']+)@", value)
        found.update(part for login in logins for part in (login, login.rpartition(":")[2]))
    return {value for value in found if len(value) > 3}


def clean(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without `secrets`, and without what looks like one; the user's folder is ``~``."""
    text = scrub(text, [*secrets, *secret_values(os.environ)])
    text = _KEY_BLOCK.sub(REDACTED, text)
    text = "\n".join(redact(line) for line in text.split("\n"))
    text = _TOKENS.sub(REDACTED, _BEARER.sub(rf"\1 {REDACTED}", text))
    text = _without_assigned(text)
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=[/\s:\"']|$)", "~", text) if len(home) > 1 else text


def _without_assigned(text: str) -> str:
    """`text` without what follows a secret name: ``name=...``, ``"name": "..."``, ``--name
    ...``."""
    parts = []
    end = 0
    for name in _NAME.finditer(text):
        if name.start() < end or not is_secret_name(name[0]):
            continue
        option = text.endswith("--", 0, name.start())
        value = _VALUE.match(text, name.end()) or (
            _NEXT_WORD.match(text, name.end()) if option else None
        )
        if value is not None:
            parts += [text[end : value.start(2)], REDACTED]
            end = value.end(2)
    return "".join([*parts, text[end:]])
