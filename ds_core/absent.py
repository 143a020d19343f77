"""What to say of a name that neither the engine nor its module has.

Read only once somebody has asked for such a name.
"""

from __future__ import annotations

from typing import Any

from ds_core.catalogue import instead_of

__all__ = ["no_attribute"]


def no_attribute(engine: Any, name: str, error: AttributeError) -> AttributeError:
    """`error`, which the engine's module raised for `name`, or a better one: it may be a name of the engine's."""
    module = engine.module
    if hasattr(type(module), name) or str(error) != f"{type(module).__name__!r} object has no attribute {name!r}":
        return error  # a property of the model's that failed, or a model that has words of its own
    text = f"neither the engine nor its module, a {type(module).__name__}, has an attribute {name!r}"
    if (instead := instead_of(name)) is None and name in type(engine.config.core).model_fields:
        instead = f"it is engine.config.core.{name}"
    # With name and obj Python looks for similar names by itself, when the error is shown.
    return AttributeError(f"{text}: {instead}" if instead else text, name=name, obj=engine)
