"""The command-line arguments that DeepSpeed scripts take; `ds_core.initialize` reads them from
``args``.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

log = logging.getLogger("ds_core")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the "DeepSpeed" group of command-line arguments to `parser` and return it."""
    group = parser.add_argument_group("DeepSpeed", "settings of the training engine")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="accepted so that existing commands work; the engine is chosen by calling initialize",
    )
    group.add_argument("--deepspeed_config", default=None, metavar="PATH", help="the config file")
    group.add_argument(
        "--deepscale",
        dest="deepspeed",
        action=_Deprecated,
        nargs=0,
        const=True,
        help="deprecated spelling of --deepspeed",
    )
    group.add_argument(
        "--deepscale_config",
        dest="deepspeed_config",
        action=_Deprecated,
        metavar="PATH",
        help="deprecated spelling of --deepspeed_config",
    )
    return parser


class _Deprecated(argparse.Action):
    """Store as the present spelling would, with a warning."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        log.warning("%s is deprecated; use --%s", option_string, self.dest)
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
