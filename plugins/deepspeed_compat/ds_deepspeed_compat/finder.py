"""The finder that makes ``deepspeed`` and its modules on demand from the table in `names`.

Where no DeepSpeed is installed, the .pth file of the distribution asks `last_resort` for it, after
all other finders. `install` puts `FINDER` first on ``sys.meta_path``, so that ds_core is used also
beside a DeepSpeed. A module is a `ServedModule`: it resolves each name on first use, so importing
costs next to nothing, and what it gives are the objects of ds_core and its plugins themselves. The
finder also answers `importlib.metadata`, for frameworks that look for the distribution. It needs
the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

VARIABLE = "DS_CORE_AS_DEEPSPEED"
_ROOT = "deepspeed"


def as_deepspeed(wanted: bool, words: list[str]) -> dict[str, str]:
    """``dscore run --as-deepspeed``: the variable by which processes take this package for
    DeepSpeed.
    """
    return {VARIABLE: "1"}


class ServedModule(ModuleType):
    """A module of ``deepspeed``; its names are resolved on first use."""

    def __getattr__(self, name: str) -> Any:
        value = _resolve(self.__name__, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        from ds_deepspeed_compat.names import names_of

        served = (name for name in names_of(self.__name__) if _absent(self.__name__, name) is None)
        return sorted({*super().__dir__(), *served, *_below(self.__name__)})


@dataclass(frozen=True)
class Folder:
    """What stands for the folder of a package: `pkgutil` asks it for the modules inside."""

    package: str

    @property
    def path(self) -> str:
        """A place of its own, where no file is; absolute, since importlib forgets the finders of
        all others.
        """
        return str(Path(__file__).with_name("served").joinpath(*self.package.split(".")))

    def iter_modules(self, prefix: str = "") -> Iterable[tuple[str, bool]]:
        """The name of each module inside, and whether it is a package."""
        return ((prefix + name, True) for name in _below(self.package))

    def find_spec(
        self, name: str, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module inside."""
        return FINDER.find_spec(name, target=target)

    def invalidate_caches(self) -> None:
        """Nothing is cached."""


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
            return importlib.machinery.ModuleSpec(name, self, origin="dscore-deepspeed-compat")  # type: ignore[arg-type]
        if name not in modules():
            # `from deepspeed.x import y` asks for a module of this name when there is no attribute.
            # What is raised here is the ImportError that the user reads; None would give one
            # without the reason.
            if parent in modules() and (why := _absent(parent, last)) is not None:
                raise ImportError(why, name=name)
            return None
        return importlib.machinery.ModuleSpec(
            name,
            self,  # type: ignore[arg-type]
            origin="dscore-deepspeed-compat",
            is_package=True,
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty module."""
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed; on the root the log says that this is ds_core, and whom it
        displaces.
        """
        # `pkgutil` and importlib look for modules below a path: this one leads back to the finder.
        folder = Folder(module.__name__)
        sys.path_importer_cache[folder.path] = folder
        module.__path__ = [folder.path]
        # What follows is done once per process, for the root package; only rank 0 logs.
        if module.__name__ != _ROOT:
            return
        module.__file__ = __file__
        _launcher_variables()
        if os.environ.get("RANK", "0") != "0":
            return
        import logging

        log = logging.getLogger("ds_core")
        if (real := displaced()) is None:
            log.info(
                "`import deepspeed` gives ds_core: dscore-deepspeed-compat is installed, and no "
                "DeepSpeed is"
            )
        else:
            log.warning(
                "`import deepspeed` gives ds_core, as asked; the DeepSpeed installed in %s is not "
                "used",
                real,
            )

    def get_code(self, name: str) -> CodeType:
        """What ``python -m deepspeed.x.y`` runs: the function `main` of that module."""
        return compile(
            f"from {name.removesuffix('.__main__')} import main\nmain()\n", f"<{name}>", "exec"
        )

    def find_distributions(self, context: Any = None) -> Iterable[Any]:
        """A distribution ``deepspeed``, for `importlib.metadata`; none when certain folders are
        searched.
        """
        if context is None or (
            context.path is sys.path
            and (context.name is None or context.name.lower().replace("_", "-") == _ROOT)
        ):
            from ds_deepspeed_compat.distribution import ServedDistribution

            yield ServedDistribution()

    def invalidate_caches(self) -> None:
        """Nothing is cached."""


FINDER = Finder()


def install() -> None:
    """Let ``import deepspeed`` give ds_core in this process from now on; installing twice does
    nothing.

    Call it before anything imports deepspeed or a framework that looks for it (transformers,
    accelerate).
    """
    # Objects that were taken from a real DeepSpeed would stay its own.
    loaded = sys.modules.get(_ROOT)
    if loaded is not None and not isinstance(loaded, ServedModule):
        from ds_core.errors import UsageError

        raise UsageError(
            f"deepspeed is imported already, from {getattr(loaded, '__file__', None)}; call "
            "install() before that, "
            f"or set {VARIABLE}=1 for the whole process"
        )
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    _launcher_variables()


def last_resort(name: str) -> importlib.machinery.ModuleSpec | None:
    """What the .pth file of the distribution asks for ``deepspeed`` and its modules, if nobody else
    has found them.
    """
    return FINDER.find_spec(name)


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


def _below(package: str) -> list[str]:
    """The modules right inside a package, by their last names, in order."""
    from ds_deepspeed_compat.names import modules

    inside = (
        path.removeprefix(f"{package}.") for path in modules() if path.startswith(f"{package}.")
    )
    return sorted(name for name in inside if "." not in name)


def _resolve(path: str, name: str) -> Any:
    """What ``path.name`` is: an object or a module.

    Raises AttributeError where there is none; for a name of DeepSpeed's it says why, and what to
    use.
    """
    from ds_deepspeed_compat.names import modules, names_of
    from ds_deepspeed_compat.names.entry import State

    names = names_of(path)
    if name == "__all__":  # what `import *` asks for
        return sorted(n for n in names if not n.startswith("_") and _absent(path, n) is None)
    if (why := _absent(path, name)) is not None:
        raise AttributeError(why)
    if (row := names.get(name)) is not None:
        if row.state is State.CONSTANT:
            return row.value
        if row.target:
            return _load(name, row.target)
    if f"{path}.{name}" in modules():
        return importlib.import_module(f"{path}.{name}")
    text = f"module {path!r} has no attribute {name!r}"
    raise AttributeError(
        text
        if name.startswith("__")
        else f"{text} that ds_core serves; docs/migrate.md has them all"
    )


def _absent(path: str, name: str) -> str | None:
    """Why a name of DeepSpeed's is not there, and what to use or to install; None for every other
    name.
    """
    from ds_deepspeed_compat.names import modules, names_of
    from ds_deepspeed_compat.names.entry import State

    # A name may be missing as an object and be there as a module.
    row = names_of(path).get(name)
    if (
        row is None
        or row.state is State.CONSTANT
        or (row.state is State.MISSING and f"{path}.{name}" in modules())
    ):
        return None
    if row.state is State.MISSING:
        return f"{path}.{name} is not offered by ds_core: {row.text}"
    # `find_spec` imports nothing, so that a look at a module loads no plugin.
    package = row.target.partition(":")[0].partition(".")[0]
    if package == _ROOT or package in sys.modules or importlib.util.find_spec(package) is not None:
        return None
    from ds_core.catalogue import install as how

    dist = "dscore-" + package.removeprefix("ds_").replace("_", "-")
    return f"{path}.{name} is served by {dist}, which is not installed: {how(dist)}"


def _load(name: str, target: str) -> Any:
    module, colon, attribute = target.partition(":")
    found = importlib.import_module(module)
    return found if colon and not attribute else getattr(found, attribute or name)
