"""The logger and the functions that log on certain ranks (loads no torch)."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class LoggerFactory:
    """Makes loggers."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """A logger that writes to stdout."""
        if name is None:
            raise ValueError("create_logger needs a name")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not made.handlers:
            handler = logging.StreamHandler(stream=sys.stdout)
            handler.setFormatter(
                logging.Formatter(
                    "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] "
                    "%(message)s"
                )
            )
            made.addHandler(handler)
        return made


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level's name; ValueError for an unknown one."""
    if log_level_str.lower() not in log_levels:
        raise ValueError(
            f"{log_level_str!r} is not a log level; use one of {', '.join(log_levels)}"
        )
    return log_levels[log_level_str.lower()]


logger = LoggerFactory.create_logger(
    "DeepSpeed", get_log_level_from_string(os.environ.get("DS_LOG_LEVEL", "warning"))
)


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Set the logger's level by name."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """The logger's level."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger's level is at most this one."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks; on all with None, an empty list or -1."""
    rank = _rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message, stacklevel=2)


def log_dist_once(
    message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO
) -> None:
    """`log_dist`, the first time only."""
    _once(message, tuple(ranks or ()), level)


@functools.cache
def _once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """``logger.warning``, the first time only."""
    logger.warning(*args, **kwargs)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on the given ranks; on all with None, an empty list or -1."""
    rank = _rank()
    if not ranks or -1 in ranks or rank in ranks:
        print(f"[Rank {rank}] {message}")


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None
) -> None:
    """Write a mapping with its rank as JSON to the file `path`, on the given ranks."""
    rank = _rank()
    if path is not None and (not ranks or -1 in ranks or rank in ranks):
        message["rank"] = rank
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(message, stream)


def print_configuration(args: Any, name: str) -> None:
    """Log every attribute of a namespace."""
    logger.info("%s:", name)
    for key in sorted(vars(args)):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), getattr(args, key))


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))
