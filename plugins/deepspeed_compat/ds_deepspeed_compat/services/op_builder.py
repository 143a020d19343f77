"""``deepspeed.ops.op_builder`` and ``__compatible_ops__``: which kernels there are, answered from
ds_core's table.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ds_core.entries import resolve
from ds_core.errors import KernelError
from ds_core.kernels import Kernels
from ds_core.plugins import Plugins


class OpBuilder:
    """A kernel of ds_core under the name of DeepSpeed's builder.

    NAME: DeepSpeed's name of the operation.
    op, device: the kernel's; see ``dscore ops list``.
    """

    NAME = ""
    op = ""
    device = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """The name with its package."""
        return f"deepspeed.ops.{self.name}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether compiled code can serve the operation on this machine."""
        try:
            rows = _table().candidates(self.op, self.device, "float32")
        except KernelError:
            return False
        return any(row.reason is None and row.entry.build is not None for row in rows)

    def load(self, verbose: bool = True) -> Any:
        """The function that serves the operation, built first if need be."""
        return _table().get(self.op, self.device)

    jit_load = load

    def builder(self) -> OpBuilder:
        """This."""
        return self


def _table() -> Kernels:
    return Kernels(Plugins())


def _builder(class_name: str, name: str, op: str, device: str) -> type[OpBuilder]:
    return type(
        class_name, (OpBuilder,), {"NAME": name, "op": op, "device": device, "__module__": __name__}
    )


BUILDERS = {
    name: _builder(name, *row)
    for name, row in {
        "CPUAdamBuilder": ("cpu_adam", "adam", "cpu"),
        "CPUAdagradBuilder": ("cpu_adagrad", "adagrad", "cpu"),
        "CPULionBuilder": ("cpu_lion", "lion", "cpu"),
        "FusedAdamBuilder": ("fused_adam", "adam", "cuda"),
        "FusedLambBuilder": ("fused_lamb", "lamb", "cuda"),
        "FusedLionBuilder": ("fused_lion", "lion", "cuda"),
    }.items()
}
if TYPE_CHECKING:
    ALL_OPS: dict[str, Any]


def _all_ops() -> dict[str, Any]:
    """Every builder by its operation's name; that of files where dscore-nvme is installed."""
    files = {"async_io": resolve("ds_nvme.handle:AsyncIOBuilder")()} if find_spec("ds_nvme") else {}
    return {**{builder.NAME: builder() for builder in BUILDERS.values()}, **files}


def __getattr__(name: str) -> Any:
    if name == "ALL_OPS":
        return _all_ops()
    if name == "compatible_ops":
        return {name: builder.is_compatible() for name, builder in _all_ops().items()}
    if name in BUILDERS:
        return BUILDERS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
