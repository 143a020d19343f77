"""The finder that makes ``deepspeed`` and its modules on demand from the table in `names` (standard library only).

One object, `FINDER`, put first on ``sys.meta_path`` by `install`. A module is a `ServedModule`: it resolves each name
when it is first asked for, so importing costs next to nothing, and what it gives are the objects of ds_core and its
plugins themselves. The finder also answers `importlib.metadata`, for frameworks that look for the distribution.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["FINDER", "VARIABLE", "ServedModule", "displaced", "install", "spec_of_ds_core_compat"]

VARIABLE = "DS_CORE_AS_DEEPSPEED"
_ROOT = "deepspeed"


class ServedModule(ModuleType):
    """A module of ``deepspeed``; its names are resolved on first use."""

    def __getattr__(self, name: str) -> Any:
        value = _resolve(self.__name__, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        from ds_deepspeed_compat.names import modules, names_of

        below = (p.removeprefix(f"{self.__name__}.") for p in modules() if p.startswith(f"{self.__name__}."))
        return sorted({*super().__dir__(), *names_of(self.__name__), *(p for p in below if "." not in p)})


class Finder:
    """Finds the modules of the table, makes them, and answers for a distribution ``deepspeed``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of the table; None for every other."""
        if name != _ROOT and not name.startswith(_ROOT + "."):
            return None
        from ds_deepspeed_compat.names import modules, names_of

        parent, _, last = name.rpartition(".")
        if last == "__main__" and parent in modules() and "main" in names_of(parent):
            return importlib.machinery.ModuleSpec(name, self, origin="ds-deepspeed-compat")  # type: ignore[arg-type]
        if name not in modules():
            return None
        return importlib.machinery.ModuleSpec(name, self, origin="ds-deepspeed-compat", is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty module."""
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed; on the root it is said whom this DeepSpeed displaces."""
        if module.__name__ == _ROOT and (real := displaced()) is not None and os.environ.get("RANK", "0") == "0":
            import logging

            logging.getLogger("ds_core").warning(
                "`import deepspeed` gives ds_core, as asked; the DeepSpeed installed in %s is not used", real
            )

    def get_code(self, name: str) -> CodeType:
        """What ``python -m deepspeed.x.y`` runs: the function `main` of that module."""
        return compile(f"from {name.removesuffix('.__main__')} import main\nmain()\n", f"<{name}>", "exec")

    def find_distributions(self, context: Any = None) -> Iterable[Any]:
        """A distribution ``deepspeed``, for `importlib.metadata`; none when certain folders are searched."""
        if context is None or (
            context.path is sys.path and (context.name is None or context.name.lower().replace("_", "-") == _ROOT)
        ):
            from ds_deepspeed_compat.distribution import ServedDistribution

            yield ServedDistribution()

    def invalidate_caches(self) -> None:
        """Nothing is cached."""


FINDER = Finder()


def install() -> None:
    """Let ``import deepspeed`` give ds_core in this process from now on; installing twice does nothing.

    Call it before anything imports deepspeed or a framework that looks for it (transformers, accelerate).
    """
    loaded = sys.modules.get(_ROOT)
    if loaded is not None and not isinstance(loaded, ServedModule):
        from ds_core.errors import UsageError

        raise UsageError(
            f"deepspeed is imported already, from {getattr(loaded, '__file__', None)}; call install() before that, "
            f"or set {VARIABLE}=1 for the whole process"
        )
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    _launcher_variables()


def spec_of_ds_core_compat() -> importlib.machinery.ModuleSpec | None:
    """``ds_core.compat``, which is this package's ``__main__``; asked by the .pth file of the distribution."""
    return importlib.util.spec_from_file_location("ds_core.compat", Path(__file__).with_name("__main__.py"))


def _launcher_variables() -> None:
    """The variables that DeepSpeed's launcher sets besides torch's own."""
    env = os.environ
    if "LOCAL_WORLD_SIZE" in env:
        env.setdefault("LOCAL_SIZE", env["LOCAL_WORLD_SIZE"])
        env.setdefault("CROSS_RANK", env.get("GROUP_RANK", "0"))
        env.setdefault("CROSS_SIZE", env.get("GROUP_WORLD_SIZE", "1"))


def displaced() -> str | None:
    """The folder of a real DeepSpeed that is installed too."""
    spec = importlib.machinery.PathFinder.find_spec(_ROOT)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def _resolve(path: str, name: str) -> Any:
    """What ``path.name`` is: an object, a module, or the stand-in of a name that cannot be served."""
    from ds_deepspeed_compat.names import State, modules, names_of

    names = names_of(path)
    if name == "__all__":  # what `import *` asks for
        return sorted(n for n, row in names.items() if row.state is not State.MISSING and not n.startswith("_"))
    if (row := names.get(name)) is not None:
        return _missing(path, name, row.text) if row.state is State.MISSING else _load(path, name, row.target)
    if f"{path}.{name}" in modules():
        return importlib.import_module(f"{path}.{name}")
    text = f"module {path!r} has no attribute {name!r}"
    raise AttributeError(text if name.startswith("__") else f"{text} that ds_core serves; docs/migrate.md has them all")


def _load(path: str, name: str, target: str) -> Any:
    module, colon, attribute = target.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        from ds_core.catalogue import install as how
        from ds_deepspeed_compat.missing import stand_in

        dist = error.name.replace("_", "-")
        return stand_in(path, name, f"{path}.{name} is served by {dist}, which is not installed: {how(dist)}")
    return found if colon and not attribute else getattr(found, attribute or name)


def _missing(path: str, name: str, instead: str) -> type:
    from ds_deepspeed_compat.missing import stand_in

    return stand_in(path, name, f"{path}.{name} is not offered by ds_core: {instead}")
