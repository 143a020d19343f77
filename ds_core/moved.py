"""Names that have moved, under their old ones: modules and attributes of earlier layouts, of the core
and of our packages that others import (torch-free).

An old name gives what the new one has, with a DeprecationWarning that says the new one. ``dscore
plugins upgrade`` rewrites sources by the same tables. What is here goes two minor releases after it
moved (docs/stability.md).
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

_SUITES = {
    "devices": "accelerator compile_pass kernels late_device memory store",
    "parallel": "collectives fake_axes given_back interceptor mesh runner sharded_steps sharding",
    "tools": "command config_hooks engine_methods formats launcher monitor plugin rendezvous",
    "train": "checkpointer fake_gradients gradients kept_state loader observer optimizer partitioner "
    "precision scheduler transform",
}
"""Folder below ``ds_testing.kits`` -> its modules, which lay in ``ds_testing`` itself."""

MODULES = {
    **{
        f"ds_testing.{name}": f"ds_testing.kits.{room}.{name}"
        for room, names in _SUITES.items()
        for name in names.split()
    },
    "ds_cli.app": "ds_command_kit.app",
    "ds_cli.config_code": "ds_command_kit.config_code",
    "ds_cli.explanation": "ds_cli.config.explanation",
    "ds_cli.hookspecs": "ds_command_kit.hookspecs",
    "ds_cli.hosts": "ds_command_kit.hosts",
    "ds_cli.hosts.elastic_store": "ds_launcher_ssh.elastic_store",
    "ds_cli.launch": "ds_command_kit.launch",
    "ds_cli.memory": "ds_command_kit.memory",
    "ds_cli.progress": "ds_command_kit.progress",
    "ds_cli.run_options": "ds_command_kit.run_options",
    "ds_cli.schema": "ds_cli.config.schema",
    "ds_cli.show": "ds_command_kit.show",
    "ds_core.access": "ds_access.states",
    "ds_core.accelerator.contract": "ds_core.accelerator",
    "ds_core.accelerator.entries": "ds_core.entries",
    "ds_core.accelerator.select": "ds_core.accelerator",
    "ds_core.answers": "ds_core.entries",
    "ds_core.batches": "ds_core.data",
    "ds_core.boxes": "ds_checkpoint.folder.boxes",
    "ds_core.checkpoint": "ds_checkpoint",
    "ds_core.checkpoint.importing": "ds_checkpoint_deepspeed.importing",
    "ds_core.checkpoint.opening": "ds_run_state.opening",
    "ds_core.checkpoint.rng": "ds_run_state.rng",
    "ds_core.cli": "ds_cli",
    "ds_core.cli.checkpoint": "ds_checkpoint.command",
    "ds_core.cli.ops": "ds_kernel_kit.command",
    "ds_core.comm.fingerprint": "ds_core.comm.agreement",
    "ds_core.comm.gloo": "ds_comm_gloo.gloo",
    "ds_core.comm.guard": "ds_comms_guard",
    "ds_core.comm.log": "ds_comms_logger",
    "ds_core.comm.meeting": "ds_rendezvous.meeting",
    "ds_core.config.batch": "ds_core.config.core",
    "ds_core.config.explanation": "ds_cli.config.explanation",
    "ds_core.config.run": "ds_core.config.build",
    "ds_core.config.schema": "ds_cli.config.schema",
    "ds_core.config.structs": "ds_deepspeed_compat.configs.config",
    "ds_core.filemonitor": "ds_monitor_kit.buffered",
    "ds_core.kernels.build": "ds_kernel_kit.build",
    "ds_core.kernels.compiled": "ds_kernel_kit.marshal",
    "ds_core.kernels.references": "ds_kernel_kit.references",
    "ds_core.monitor": "ds_core.telemetry",
    "ds_core.mpu": "ds_deepspeed_compat.engines.mpu",
    "ds_core.offers": "ds_core.discovery",
    "ds_core.param_shard": "ds_access.param_shard",
    "ds_core.progress": "ds_command_kit.progress",
    "ds_core.requests": "ds_core.entries",
    "ds_core.runstate": "ds_run_state.run_state",
    "ds_core.slices": "ds_run_state.slices",
    "ds_core.stash": "ds_core.context",
    "ds_core.stores": "ds_state_stores",
    "ds_core.testing": "ds_testing",
    "ds_core.testing.kernels": "ds_kernel_kit.comparisons",
    "ds_core.whole": "ds_access.unshard",
    "ds_core.window": "ds_core.accumulation",
    "ds_core.zerograd": "ds_core.gradient_hooks",
    "ds_testing.clusters": "ds_testing_hosts.clusters",
    "ds_testing.hosts": "ds_testing_hosts.lab",
    "ds_testing.hosts_ray": "ds_testing_hosts.ray_hosts",
    "ds_testing.launched_hosts": "ds_testing_hosts.launched_hosts",
}
"""Old module -> where its names are now. What lies below an old module lies below the new one."""

NAMES = {
    "ds_core.discovery": {"OFFERS": "ds_core.discovery:offers()"},
    "ds_core.engine": {"required": "ds_core.stepping:required"},
    "ds_core.hookspecs": {
        "ds_charts": "ds_command_kit.hookspecs:ds_charts",
        "ds_checkpointables": "ds_run_state.hookspecs:ds_checkpointables",
        "ds_commands": "ds_command_kit.hookspecs:ds_commands",
        "ds_compile_passes": "ds_compile.hookspecs:ds_compile_passes",
        "ds_launchers": "ds_command_kit.hookspecs:ds_launchers",
        "ds_memory": "ds_command_kit.hookspecs:ds_memory",
        "ds_state_stores": "ds_state_stores.hookspecs:ds_state_stores",
    },
    "ds_core.kernels": {"portion_sizes": "ds_kernel_kit.portions:portion_sizes"},
    "ds_core.mesh": {"MpuMesh": "ds_deepspeed_compat.engines.mpu:MpuMesh"},
    "ds_core.partition": {
        "StateSource": "ds_run_state.states:StateSource",
        "StateTensor": "ds_run_state.states:StateTensor",
        "buffer_states": "ds_run_state.states:buffer_states",
        "read_state": "ds_run_state.states:read_state",
        "saved_optimizer_states": "ds_run_state.states:saved_optimizer_states",
        "set_optimizer_state": "ds_run_state.states:set_optimizer_state",
    },
    "ds_core.slices": {"as_wholes": "ds_run_state.slices:unslice"},
    "ds_core.stores": {"away": "ds_state_stores:is_evicted"},
}
"""Module -> its names that are elsewhere now: old name -> ``module:name``, or ``module:name()`` for
what it gives.
"""


HOOKS_BEFORE = frozenset(("ds_engine_methods", "ds_eval_begin", "ds_eval_end", "ds_exception"))
"""Hooks that had another form or name, see `ds_core.old_forms`."""

METHODS = {"StateStore": {"drop": "discard", "place": "copy_in", "ready": "wait", "stow": "evict"}}
"""Class of a contract -> its methods that have another name now."""


def now(module: str) -> str | None:
    """Where the module `module` of an earlier layout is now; None for one that has not moved."""
    head = module
    rest = ""
    while head:
        if head in MODULES:
            found = MODULES[head] + rest
            return now(found) or found  # it may have moved again
        head, dot, last = head.rpartition(".")
        rest = f"{dot}{last}{rest}"
    return None


def check_contract(plugin: object, needs: Any) -> None:
    """Raises PluginError for a plugin that needs another contract than this core keeps."""
    from ds_core import __version__, contract, oldest_contract
    from ds_core.errors import PluginError

    if type(needs) is not int:
        raise PluginError(
            f"plugin {plugin} has DS_CONTRACT = {needs!r}; it is a whole number, such as {contract}"
        )
    keeps = f"ds-core {__version__} keeps {oldest_contract} to {contract}"
    if needs > contract:
        raise PluginError(f"plugin {plugin} needs contract {needs}, and {keeps}: upgrade ds-core")
    if needs < oldest_contract:
        raise PluginError(
            f"plugin {plugin} was written for contract {needs}, and {keeps}: upgrade it, or "
            "install an older ds-core"
        )


def names_of(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module of the core from which names have moved."""

    def find(name: str) -> Any:
        target = NAMES[module].get(name)
        if target is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return _from(f"{module}.{name}", target)

    return find


def _from(old: str, target: str) -> Any:
    home, _, name = target.partition(":")
    _warn(old, f"{home}.{name}", stacklevel=4)
    found = getattr(_import(old, home), name.removesuffix("()"))
    return found() if name.endswith("()") else found


def _warn(old: str, new: str, stacklevel: int) -> None:
    text = f"{old} is {new} now; `dscore plugins upgrade PATH` rewrites a plugin's sources"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


def _import(old: str, new: str) -> ModuleType:
    try:
        return importlib.import_module(new)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != new.partition(".")[0]:
            raise
        from ds_core.catalogue import install

        dist = new.partition(".")[0].replace("_", "-")
        text = f"{old} is {new} now, of {dist}, which is not installed: {install(dist)}"
        raise ModuleNotFoundError(text, name=old) from error


class _Finder:
    """Finds modules of earlier layouts, for ``import``."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """A spec for a module that has moved."""
        if not name.startswith("ds_") or (new := now(name)) is None:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, _Loader(new))  # type: ignore[arg-type]  # it has what import asks for


class _Loader:
    """Makes a module of an earlier layout: one that gives the names of the new one."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: Any) -> ModuleType:
        """An own object, so that the new module keeps its name; a package, for what lies below
        it."""
        made = ModuleType(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Take over what the new module has."""
        old = module.__name__
        _warn(old, self.new, stacklevel=3)
        home = _import(old, self.new)
        renamed = NAMES.get(old, {})

        def find(name: str) -> Any:
            if not hasattr(home, name) and name in renamed:
                return _from(f"{old}.{name}", renamed[name])
            return getattr(home, name)

        for name, value in vars(home).items():
            if not (name.startswith("__") and name.endswith("__")):
                module.__dict__[name] = value
        module.__dict__.update(__getattr__=find, __dir__=lambda: dir(home), __doc__=home.__doc__)
        if hasattr(home, "__all__"):
            module.__dict__["__all__"] = [*home.__all__]


def install() -> None:
    """Let imports find modules of earlier layouts; before other finders, which would look below the
    new ones.
    """
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
