from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ds_core.accelerator import get_accelerator as get_accelerator
from ds_core.accelerator import set_accelerator as set_accelerator
from ds_core.comm import init_distributed as init_distributed
from ds_core.config import Section as Section
from ds_core.engine import DistributedLoader as DistributedLoader
from ds_core.engine import Engine as Engine
from ds_core.engine import RepeatingLoader as RepeatingLoader
from ds_core.engine import Runner as Runner
from ds_core.engine import Sequential as Sequential
from ds_core.partition import Partitioner as Partitioner
from ds_core.partition import Replicated as Replicated
from ds_core.plugins.hookspecs import hookimpl as hookimpl
from ds_core.process import reset as reset
from ds_core.setup.compose import compose as compose
from ds_core.setup.start import Initialized as Initialized
from ds_core.setup.start import initialize as initialize

__version__: str
contract: int
oldest_contract: int

def names_on_first_use(
    package: str, homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], Iterable[str]]]: ...
