"""What dscore-compile offers to ds_core: the section ``compile`` and the engine's ``compile``
(torch-free).

It stands in both groups of entry points: as a backend it serves ``engine.compile()`` of every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.comm.interceptor import Interceptor
    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.engine import Engine
    from ds_core.entries import Ref
    from ds_core.errors import Problem
    from ds_core.plugins import Plugins


def ds_config() -> type[BaseModel]:
    """The section ``compile``."""
    from ds_compile.config import CompileConfig

    return CompileConfig


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """Every pass is offered by somebody."""
    from ds_compile.config import CompileConfig
    from ds_core.catalogue import install, offered_by
    from ds_core.errors import Problem, did_you_mean

    section = config.section(CompileConfig)
    wanted = section.passes or () if section is not None else ()
    known = plugins.named("ds_compile_passes", "compile_passes")
    for index, name in enumerate(wanted):
        if name.lower() in known:
            continue
        path = f"compile.passes[{index}]"
        if dist := offered_by("compile_passes", name):
            what = f"compile pass {name!r} is of {dist}, which takes no part in this run"
            yield Problem(
                path, what, f"give its section, and install it if it is missing ({install(dist)})"
            )
        else:
            fix = f"{did_you_mean(name, known)} there are: {', '.join(sorted(known)) or 'none'}"
            yield Problem(path, f"no compile pass is called {name!r}", fix.strip())


def ds_engine_methods() -> Mapping[str, Ref]:
    """``engine.compile`` calls the first."""
    return {
        "compile_model": "ds_compile.compile_model:compile_model",
        "register_compile_pass": "ds_compile.passes:register_compile_pass",
    }


def ds_open(ctx: Context) -> None:
    """With ``compile.at_start`` the model is compiled now, on every rank."""
    from ds_compile.config import CompileConfig

    section = ctx.config.section(CompileConfig)
    if section is not None and section.at_start:
        from ds_compile.compile_model import compile_model

        compile_model(cast("Engine", ctx.engine), section.backend)


def ds_interceptors(config: RunConfig) -> Iterable[Interceptor]:
    """Where the config asks for it: waits around reductions and gathers."""
    from ds_compile.config import CompileConfig

    section = config.section(CompileConfig)
    if section is None:
        return ()
    from ds_compile.waits import waits_of

    return waits_of(section)


def ds_step_end(ctx: Context, step: int) -> None:
    """Says once that nothing is compiled; and follows the schedule of passes."""
    from ds_compile.compile_model import after_step

    after_step(ctx, step)
