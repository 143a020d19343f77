"""Layer reduction: a student gets the weights of some of its teacher's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_run_state.lazy import lazy_weight
from torch import nn

from ds_compression.config import LayerReduction
from ds_compression.reading import inner, section_of
from ds_core.errors import ConfigError, Problem, UsageError


def student_initialization(
    student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any
) -> nn.Module:
    """Copy the teacher's weights into the student as ``compression_training.layer_reduction`` says;
    the student.

    The student's layer i gets the teacher's layer ``teacher_layer[i]``. Not collective. Raises
    ConfigError where a module is missing in either, or their weights have other shapes.
    """
    copy_layers(
        inner(student_model), inner(teacher_model), section_of(deepspeed_config).layer_reduction
    )
    return student_model


def copy_layers(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    """Copy modules; nothing is copied where one does not fit."""
    pairs = list(_pairs(section))
    problems = []
    jobs = []
    for path, to, source in pairs:
        found = [_find(model, name) for model, name in ((student, to), (teacher, source))]
        missing = [
            f"the {who} has no module {n!r}"
            for who, n, m in zip(("student", "teacher"), (to, source), found, strict=True)
            if m is None
        ]
        if missing:
            problems.append(
                Problem(
                    path, " and ".join(missing), "give whole names, as in model.named_modules()"
                )
            )
            continue
        mine, theirs = (m.state_dict() for m in found if m is not None)
        _check_whole(found)
        # All that does not fit is reported together, before anything is copied.
        other = [k for k in mine.keys() | theirs.keys() if _shape(mine, k) != _shape(theirs, k)]
        if other:
            problems.append(
                Problem(
                    path,
                    f"{to} and the teacher's {source} differ in {', '.join(sorted(other)[:5])}",
                )
            )
        jobs.append((found[0], theirs))
    if problems:
        raise ConfigError(problems)
    for module, values in jobs:
        assert module is not None
        module.load_state_dict(values)


def _pairs(section: LayerReduction) -> Iterator[tuple[str, str, str]]:
    """(key, name in the student, name in the teacher)."""
    root = "compression_training.layer_reduction"
    for index, layer in enumerate(section.teacher_layer):
        prefix = section.module_name_prefix
        yield f"{root}.teacher_layer[{index}]", f"{prefix}.{index}", f"{prefix}.{layer}"
    for index, name in enumerate(section.other_module_name):
        yield f"{root}.other_module_name[{index}]", name, name


def _find(model: nn.Module, name: str) -> nn.Module | None:
    return dict(model.named_modules()).get(name)


def _check_whole(modules: list[nn.Module | None]) -> None:
    for module in modules:
        if module is not None and any(
            lazy_weight(p) is not None or not p.numel() for p in module.parameters()
        ):
            raise UsageError(
                "layer_reduction copies full weights, and these are sharded: call it before "
                "initialize, on models "
                "that were not built under ds_zero.Init"
            )


def _shape(state: dict[str, Any], key: str) -> Any:
    return getattr(state.get(key), "shape", None)
