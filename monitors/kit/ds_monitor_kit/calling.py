"""How a monitor calls a service: its secrets are hidden, it does not end the program, and a long
wait is reported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterator

from ds_core.config.redaction import is_secret_name, scrub
from ds_core.errors import PluginError

log = logging.getLogger("ds_monitor_kit")

LONG = 10.0
"""Seconds after which a call that training waits for is reported."""
SHORTEST = 8
"""Characters of a secret in the environment; shorter ones would blot out ordinary words."""


@contextlib.contextmanager
def hiding(section: str, secrets: Collection[str] = ()) -> Iterator[None]:
    """To call a service in: an error whose text, or cause, holds a secret is shown without it.

    secrets: besides what stands in the environment under a secret's name (WANDB_API_KEY, ...). A
    service that wants to end the program has failed: SystemExit becomes a PluginError.
    """
    try:
        yield
    except SystemExit as error:
        text = scrub(f"it called sys.exit({error.code!r})", {*secrets, *_of_environment()})
        raise PluginError(f"{section}: {text}; a service must not end a run") from None
    except Exception as error:
        known = {*secrets, *_of_environment()}
        text = f"{type(error).__name__}: {error}"
        chain = [error.__cause__, error.__context__]
        if not any(
            secret in f"{text} {' '.join(map(repr, chain))}" for secret in known if len(secret) > 2
        ):
            raise
        raise PluginError(f"{section}: {scrub(text, known)}") from None


def _of_environment() -> set[str]:
    return {
        value
        for name, value in os.environ.items()
        if len(value) >= SHORTEST and is_secret_name(name)
    }


@contextlib.contextmanager
def telling(name: str, what: str, after: float | None = None) -> Iterator[None]:
    """One warning where what is done inside takes longer than `after` seconds.

    what: that, such as "start".
    """
    after = LONG if after is None else after
    said = f"monitor {name}: its {what} takes longer than {after:g} s, and training waits for it"
    timer = threading.Timer(after, log.warning, (said,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # at the end of the interpreter no thread begins
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
