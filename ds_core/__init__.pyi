from collections.abc import Callable, Mapping
from typing import Any

from ds_core.accelerator import get_accelerator as get_accelerator
from ds_core.accelerator import set_accelerator as set_accelerator
from ds_core.assemble import initialize as initialize
from ds_core.comm import init_distributed as init_distributed
from ds_core.compose import compose as compose
from ds_core.config import Section as Section
from ds_core.data import DistributedLoader as DistributedLoader
from ds_core.data import RepeatingLoader as RepeatingLoader
from ds_core.engine import Engine as Engine
from ds_core.hookspecs import hookimpl as hookimpl
from ds_core.partition import Partitioner as Partitioner
from ds_core.process import reset as reset
from ds_core.replicated import Replicated as Replicated
from ds_core.runner import Runner as Runner
from ds_core.runner import Sequential as Sequential

__version__: str
contract: int
oldest_contract: int

def names_on_first_use(
    package: str, homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]: ...
