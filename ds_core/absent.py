"""A name that neither the engine nor its module has: a method of an installed backend, or what to say.

Read only once somebody has asked for such a name.
"""

from __future__ import annotations

import functools
from typing import Any

from ds_core.catalogue import install, instead_of, offered_by

__all__ = ["find_elsewhere"]


def find_elsewhere(engine: Any, name: str, error: AttributeError) -> Any:
    """The method `name` of an installed backend (`ds_engine_methods`).

    Raises AttributeError where there is none: `error`, which the engine's module raised, or a better one.
    """
    module = engine.module
    if hasattr(type(module), name) or str(error) != f"{type(module).__name__!r} object has no attribute {name!r}":
        raise error  # a property of the model's that failed, or a model that has words of its own
    given = engine.ctx.plugins.merged("ds_engine_methods", installed=True, ctx=engine.ctx)
    if name in given:
        return functools.partial(given[name].value, engine)
    text = f"neither the engine nor its module, a {type(module).__name__}, has an attribute {name!r}"
    if (instead := instead_of(name)) is None:
        if name in type(engine.config.core).model_fields:
            instead = f"it is engine.config.core.{name}"
        elif (dist := offered_by("engine_methods", name)) is not None:
            instead = f"{dist} has it; {install(dist)}"
    # With name and obj Python looks for similar names by itself, when the error is shown.
    raise AttributeError(f"{text}: {instead}" if instead else text, name=name, obj=engine) from None
