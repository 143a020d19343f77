"""Every hook of ds_core; the docstring is the contract (torch-free).

Each hook is either a *driver* (exactly one answer is chosen: by name, by probe or by section; two that fit
equally are an error naming both) or a *hook* (every answer is used). A plugin
implements a hook by defining a function of that name in its declaration module; it may leave out
arguments it does not need.

Hooks without arguments say what a plugin *offers*; every installed plugin that is loaded is asked.
Hooks with arguments take part in a run; they are called only for plugins that the config names, or
that offer what was chosen. `gives` holds what a hook may return: anything else is an error that
names the plugin and the hook.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from ds_core.plugins.checks import (
    gives,
    many,
    model_class,
    named,
    nothing,
    numbers,
    one_or_none,
    periods,
    references,
)

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import Tensor, nn

    from ds_core import entries
    from ds_core.comm.interceptor import Interceptor
    from ds_core.config import Batch, RunConfig
    from ds_core.context import Context
    from ds_core.engine import Checkpointer, Loader, LoaderRequest, Monitor, Runner
    from ds_core.errors import Problem
    from ds_core.gradients import Gradients
    from ds_core.mesh import Mesh
    from ds_core.partition import Partitioner
    from ds_core.plugins import Plugins
    from ds_core.precision import Precision

hookimpl = pluggy.HookimplMarker("ds_core")
"""Optional: names that start with ``ds_`` are hooks anyway.

Use it for pluggy's ordering options.
"""


@gives(model_class)
def ds_config() -> type[BaseModel] | Mapping[str, type[BaseModel]]:  # type: ignore[empty-body]
    """Driver, by section: the pydantic model of the section that the entry point names.

    Of a module with several entry points, a mapping: section -> its model. It takes part when the
    config names any. Called once per process before any other hook, on every rank. Forbid extra
    keys (inherit `ds_core.config.Section`). A section that is one number or string uses a
    ``RootModel``.
    """


@gives(named("builtins:str"))
def ds_config_formats() -> Mapping[str, entries.Ref]:  # type: ignore[empty-body]
    """Driver, by the suffix of a config file (".yaml"): reference to a function ``text -> data``.

    It raises `ds_core.config.Unreadable` with line and column, and makes its objects by
    `ds_core.config.to_pairs`, which remembers repeated keys. ``.json`` is the core's; where JSON
    fails, the parser for ".hjson" is tried.
    """


@gives(many("ds_core.errors:Problem"))
def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:  # type: ignore[empty-body]
    """Hook: rules that span sections, checked after all sections parsed and before processes talk.

    Ask by capability ("is gradient_clipping set?"), not by another plugin's name.

    plugins: to ask for what a name in the config means, as in
        ``plugins.named("ds_state_stores", "state_store")``.
    """


@gives(many("ds_core.entries:AcceleratorEntry"))
def ds_accelerators() -> Iterable[entries.AcceleratorEntry]:  # type: ignore[empty-body]
    """Driver, by `DS_ACCELERATOR` or by probe: the device kinds this plugin can drive."""


@gives(one_or_none("ds_core.entries:RendezvousEntry"))
def ds_rendezvous() -> entries.RendezvousEntry | None:
    """Driver, by priority: how this process finds the other ranks before the process group starts.

    Asked before there is a config. None: not here. Nobody: torchrun's variables and torch's own
    store, which the answer's `find` need not know. Two answers of one priority are an error.
    """


@gives(many("ds_core.entries:KernelEntry"))
def ds_kernels() -> Iterable[entries.KernelEntry]:  # type: ignore[empty-body]
    """Driver, by (op, device, dtype): the operations this plugin can serve."""


@gives(named("ds_core.entries:CollectivesEntry"))
def ds_collectives() -> Mapping[str, entries.CollectivesEntry]:  # type: ignore[empty-body]
    """Driver, by (device, backend) and priority, or by name in ``collectives``: the provider.

    Asked where several ranks run, before they talk; what it leaves is served by torch.distributed.
    """


@gives(named("ds_core.entries:OptimizerEntry"))
def ds_optimizers() -> Mapping[str, entries.OptimizerEntry]:  # type: ignore[empty-body]
    """Driver, by the name in ``optimizer.type`` (case-insensitive)."""


@gives(named("ds_core.entries:SchedulerEntry"))
def ds_schedulers() -> Mapping[str, entries.SchedulerEntry]:  # type: ignore[empty-body]
    """Driver, by the name in ``scheduler.type`` (case-insensitive)."""


@gives(many(("name", "write_events", "flush", "close")))
def ds_monitors(ctx: Context) -> Iterable[Monitor]:  # type: ignore[empty-body]
    """Hook: the monitors that receive metric events.

    Called on rank 0 only, once, when the engine is built.
    """


@gives(many("ds_core.entries:Axis"))
def ds_mesh_axes(config: RunConfig) -> Iterable[entries.Axis]:  # type: ignore[empty-body]
    """Hook: the mesh axes this plugin adds. Called on every rank before processes talk."""


@gives(one_or_none("ds_core.config:Batch"))
def ds_batch(config: RunConfig, dp_world: int) -> Batch | None:
    """Driver: the batch sizes on `dp_world` data-parallel ranks.

    None: not this plugin. Nobody: the three batch keys.

    Called on every rank before processes talk, and by tools. Raise `ConfigError` where so many
    ranks are not possible.
    """


@gives(one_or_none("ds_core.mesh:Mesh"))
def ds_mesh(mpu: Any, rank: int, world_size: int) -> Mesh | None:
    """Driver: the mesh over the process groups of `mpu`, the object of ``initialize(mpu=...)``.

    None: not mine.

    Asked on every rank when the process group runs, and only where `mpu` is given; then no axes are
    planned. Where no plugin that takes part answers, installed backends are asked.
    `Mesh.build_groups` comes next. Nobody: UsageError.
    """


@gives(many("ds_core.comm.interceptor:Interceptor"))
def ds_interceptors(config: RunConfig) -> Iterable[Interceptor]:  # type: ignore[empty-body]
    """Hook: what is called around every collective from here on, in order of `Interceptor.order`.

    Every rank.

    Called by ``initialize`` when the process group runs and ranks have agreed on the config, and by
    ``init_distributed(config=...)``, of installed backends too: so it may be called several times
    in a process, and one that is installed already can be returned again. They stay until
    `ds_core.comm.remove_interceptor`.
    """


@gives(many("ds_core.entries:Transform"))
def ds_transforms(ctx: Context) -> Iterable[entries.Transform]:  # type: ignore[empty-body]
    """Hook: model -> model steps, applied in order of phase, then of plugin name. Every rank.

    A step that changes the model gives ``ctx.undo`` what takes the change back
    (`ds_core.undo.Undo`).
    """


@gives(many("builtins:str", or_none=True))
def ds_param_axes(name: str, param: nn.Parameter, ctx: Context) -> Collection[str] | None:
    """Hook, merged by union: mesh axes along which ranks have *different* parameters of this name.

    name: the parameter's name in the transformed model. None or an empty collection: no opinion.
    Asked about buffers too (`param` is a plain tensor then). Gradient reduction, the global norm,
    partitioning and checkpoint layout all follow from the union.
    """


@gives(one_or_none("ds_core.partition:Partitioner"))
def ds_partitioner(ctx: Context) -> Partitioner | None:
    """Driver: the owner of the layout of model states over ranks.

    None: not this plugin. Nobody: `Replicated`.
    """


@gives(one_or_none("ds_core.engine.runner:Runner"))
def ds_runner(ctx: Context) -> Runner | None:
    """Driver: who turns micro-batches into forwards and backwards.

    None: not this plugin. Nobody: `Sequential`.
    """


@gives(one_or_none("ds_core.engine.checkpointer:Checkpointer"))
def ds_checkpointer(ctx: Context) -> Checkpointer | None:
    """Driver: who saves and loads checkpoints. None: not this plugin.

    Asked at the engine's first save or load, on every rank. Where no plugin that takes part
    answers, installed backends are asked, so a plugin in the group ``ds_core.backends`` serves
    without being named in the config. Nobody: saving and loading raise UsageError.
    """


@gives(one_or_none("ds_core.precision:Precision"))
def ds_precision(config: RunConfig, base: Precision) -> Precision | None:
    """Driver: the precision mode of a run: dtypes, casts, loss scaler, layer replacement.

    None: not this plugin.

    base: what the core's own sections (fp16, bf16, torch_autocast, data_types) ask for; return
    ``dataclasses.replace(base, ...)`` to build on it. Nobody: `base`. Called on every rank before
    processes talk; the answers are then compared, field by field.
    """


@gives(one_or_none(("__iter__", "state_dict", "load_state_dict")))
def ds_loader(ctx: Context, request: LoaderRequest) -> Loader | None:
    """Driver: who turns a dataset into this rank's batches.

    None: not this plugin. Nobody: `DistributedLoader`.

    Called on every rank, for ``training_data`` and by `ds_core.engine.data.make_loader`; the position of
    the loader of ``training_data`` is part of every checkpoint. What a loader owes is in
    `ds_core.engine.data.Loader`.
    """


@gives(references)
def ds_engine_methods() -> Mapping[str, entries.Ref]:  # type: ignore[empty-body]
    """Hook: methods for the engine, as name -> reference to a function of the engine.

    The engine has those of plugins that take part. A name that it has itself, or that another
    plugin gives with another function, is an error; names of the module are shadowed. Installed
    backends that do not take part serve names that neither the engine nor its module has. A
    function is imported when it is first called.
    """


@gives(nothing)
def ds_open(ctx: Context) -> None:
    """Hook: the engine is built, and nothing has run yet: ``ctx.engine`` is whole.

    Every rank, once, in plugin order.

    Last in `initialize`. What is made here may change numerics, so an exception ends `initialize`,
    on all ranks. Collectives are allowed. `ds_close` is called for every plugin that was asked.
    """


@gives(nothing)
def ds_gradients(ctx: Context, gradients: Gradients) -> None:
    """Hook: see or change the gradients of a step, before their norm is taken and they are clipped.

    Called on every rank, in plugin order, once per step whose gradients are finite. They are
    reduced; of sharded ones each rank has its shards (`ds_core.gradients.GradientShard`), to be
    changed in place under no_grad. They are scaled: a gradient is its tensor times
    ``gradients.factor``. Ranks that have the same shard must change it equally, so random numbers
    come from a generator that is seeded by step and parameter. Collectives are allowed: all ranks
    are here. An exception ends training.
    """


@gives(periods)
def ds_listens(ctx: Context) -> Mapping[str, int]:  # type: ignore[empty-body]
    """Hook: how often this plugin's observers are called, as hook -> n.

    n: in every n-th step; 0: never; hooks that are not named: in every step.

    For `ds_step_begin`, `ds_metrics`, `ds_step_end`, `ds_phase_begin` and `ds_phase_end`. With n
    they are called in the steps whose number, counted from 1, is a multiple of n: phases also in
    the micro-batches of that step. Asked on every rank when the engine is built, and once more when
    its first step is over. Ranks give the same answer for `ds_metrics`. An observer that does not listen
    costs nothing, so one that acts now and then says so here.
    """


@gives(nothing, observer=True)
def ds_step_begin(ctx: Context, step: int) -> None:
    """Hook (observer): an optimizer step is about to happen; `step` counts from 0. Every rank.

    An exception in this or any other observer switches the plugin's observers off after one
    warning; training continues.
    """


@gives(numbers, observer=True)
def ds_metrics(ctx: Context, step: int) -> Mapping[str, float | Tensor]:  # type: ignore[empty-body]
    """Hook (observer): numbers about the step that is done, by event name.

    An event is named as in "Train/Samples/tokens_per_second".

    Observers of `ds_step_end` get them, and monitors those of rank 0. A 0-d tensor (do not change
    it), or an object with `__float__` and `late`, is read when it is needed. Called where anybody
    on any rank reads, equally on all ranks, so collectives are allowed; from the first step on
    ``ctx.engine.telemetry.collects`` tells whether.
    """


@gives(nothing, observer=True)
def ds_step_end(ctx: Context, step: int, metrics: Mapping[str, float]) -> None:
    """Hook (observer): an optimizer step is done (or was skipped: ``metrics["skipped"]`` is 1).

    Every rank.

    metrics: ``lr``, ``grad_norm``, ``loss_scale``, ``skipped``, ``skipped_steps``, ``samples``;
    ``loss`` when it is known; and what `ds_metrics` gave on this rank. A number on a device is
    waited for when it is read.
    """


@gives(one_or_none("ds_core.entries:Request"), observer=True)
def ds_request(ctx: Context, step: int, metrics: Mapping[str, float]) -> entries.Request | None:
    """Hook (observer): ask all ranks to stop training, to save a checkpoint now, or to end.

    Called after `ds_step_end`.

    It is enough that one rank asks: all agree, by one small collective per step, and act within
    ``engine.step()``. Every folder that is asked for is saved into.
    """


@gives(nothing, observer=True)
def ds_phase_begin(ctx: Context, phase: str, inputs: Any) -> None:
    """Hook (observer): a phase begins.

    Every rank; those of a step once per micro-batch, in a pipeline and per stage.

    phase: ``"forward"``, whose `inputs` are (args, kwargs) of the model or of the first stage of a
    pipeline, else None; ``"backward"``, and in it, where the engine runs it, ``"backward_inner"``
    (autograd) and ``"backward_allreduce"`` (waiting for reductions); ``"step"``, once per optimizer
    step; ``"eval"``, around ``engine.eval_batch``, which is no part of a step, so `ds_listens` does
    not silence it. A plain ``loss.backward()`` is not seen. Phases nest properly. Work on the
    device may still be under way: measure by timing events (`Accelerator.new_event`).
    """


@gives(nothing, observer=True)
def ds_phase_end(ctx: Context, phase: str, metrics: Mapping[str, float]) -> None:
    """Hook (observer): the phase has ended, also by an exception.

    metrics: of ``"eval"`` ``loss``, where it was computed and this rank knows it (`eval_batch` says
    of which ranks it is the mean); else empty.
    """


@gives(nothing, observer=True)
def ds_checkpoint_saved(ctx: Context, folder: str, tag: str) -> None:
    """Hook (observer): the checkpoint `tag` below `folder` is saved, and durable. Every rank.

    A checkpoint that is written in the background is announced when it has been waited for: by the
    next save or load, ``engine.wait_for_checkpoint()`` or ``engine.destroy()``.
    """


@gives(nothing, observer=True)
def ds_checkpoint_loaded(ctx: Context, path: str) -> None:
    """Hook (observer): a checkpoint was loaded from `path`. Every rank."""


@gives(nothing, observer=True)
def ds_close(ctx: Context, error: BaseException | None) -> None:
    """Hook (observer): training ends.

    Once for each engine: it is being destroyed, or an exception ends the program.

    error: what nothing has caught, or what passes while the engine is destroyed; None where all
    went well, as with StopIteration and ``sys.exit(0)``. With an error other ranks may not be here,
    so use no collective then.
    """
