"""Constants that this package uses, and those that the environment decides (standard library only).

All others are values in ``names/constants.json``, by the module that has them.
"""

from __future__ import annotations

from datetime import timedelta
from os import environ

from ds_deepspeed_compat.names import constants

DEEPSPEED_OPTIMIZERS: list[str] = constants()["deepspeed.runtime.config"]["DEEPSPEED_OPTIMIZERS"]
DLTS_HOSTFILE: str = constants()["deepspeed.launcher.runner"]["DLTS_HOSTFILE"]
DEEPSPEED_ENVIRONMENT_NAME = environ.get("DS_ENV_FILE", ".deepspeed_env")
default_pg_timeout = timedelta(minutes=int(environ.get("DEEPSPEED_TIMEOUT", "30")))
