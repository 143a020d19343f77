"""What engine.compile() compiles: equal to plain torch, one graph per kind of block, everything
else outside of it.
"""

from __future__ import annotations

import copy
import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import EngineMethodsConformance, PluginConformance, run_ranks
from ds_testing.one_process import one_process_engine
from torch import nn

from ds_core import comm
from ds_core.errors import ConfigError, UsageError

sys.path.insert(0, str(Path(__file__).parent))

from compiled_models import MICRO, STEPS, data, engine_of, model, truth
from ds_testing.truth import difference, train


class TestPlugin(PluginConformance):
    entry_point = "ds_compile.plugin"
    section = "compile"
    good_config = {"deepcompile": True}


class TestMethods(EngineMethodsConformance):
    config = {"compile": {}}
    names = ("compile_model", "register_compile_pass")


def compiled_run(
    stage: int, ranks: int, config: dict[str, Any], by_hand: bool = True, **options: Any
) -> tuple[int, int, list[str]]:
    """Graphs, graph breaks and compiled modules of a run that equals plain torch."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    given = model()
    engine = engine_of(given, stage, **config)
    if by_hand:
        engine.compile("aot_eager", **options)
    names = [
        name for name, module in given.named_modules() if module._compiled_call_impl is not None
    ]
    seen: list[nn.Module] = []
    given.get_submodule(names[0]).register_forward_hook(
        lambda module, args, out: seen.append(module)
    )
    train(engine, data, STEPS, mean=False)
    # a compiled module's own hooks stay outside of its graph
    assert seen == [given.get_submodule(names[0])] * STEPS
    engine.destroy()
    assert difference(given, truth(ranks)) < 1e-12
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), names


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


_slow = pytest.mark.slow


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=_slow), pytest.param(1, marks=_slow), 2, 3]
)
def test_blocks_are_compiled_where_ranks_share(stage: int) -> None:
    """One graph, whatever the number of blocks, with every stage's hooks outside of it."""
    pytest.importorskip("ds_zero")
    for graphs, breaks, names in run_ranks(2, compiled_run, stage, 2, {}):
        assert (graphs, breaks, names) == (1, 0, BLOCKS)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch reads while it traces
def test_one_process_compiles_the_whole_model() -> None:
    assert compiled_run(0, 1, {}) == (1, 0, [""])


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_config_compiles_without_a_call(by_hand: bool) -> None:
    """A script that calls engine.compile() all the same compiles anew."""
    section = {"compile": {"at_start": True, "backend": "aot_eager"}}
    graphs, breaks, names = compiled_run(0, 1, section, by_hand)
    assert (graphs, breaks, names) == (1, 0, [""])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_the_config_compiles_blocks_where_ranks_share(stage: int) -> None:
    section = {"compile": {"at_start": True, "backend": "aot_eager"}}
    (_, breaks, names), *_ = run_ranks(2, compiled_run, stage, 2, section, False)
    assert (breaks, names) == (0, BLOCKS)


@pytest.mark.slow
def test_the_config_and_a_call_at_stage_3() -> None:
    section = {"compile": {"at_start": True, "backend": "aot_eager"}}
    (_, breaks, names), *_ = run_ranks(2, compiled_run, 3, 2, section, True)
    assert (breaks, names) == (0, BLOCKS)


def test_modules_of_the_config() -> None:
    pytest.importorskip("ds_zero")
    wanted = {"compile": {"modules": ["Block", "first"]}}
    for graphs, breaks, names in run_ranks(2, compiled_run, 3, 2, wanted):
        assert (graphs, breaks, names) == (2, 0, ["first", *BLOCKS])


def test_a_config_that_names_no_module() -> None:
    with one_process_engine(model(), small(compile={"modules": ["Blocks"]})) as engine:
        with pytest.raises(
            UsageError, match=r"compile\.modules: no module .* 'Blocks'.* did you mean '[bB]lock"
        ):
            engine.compile("aot_eager")


def small(**config: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **config,
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch reads while it traces
def test_copies_and_pickles_are_not_compiled() -> None:
    torch._dynamo.reset()
    with one_process_engine(model(1), small(compile={"modules": ["Block"]})) as engine:
        engine.compile("aot_eager")
        wanted = engine(data(0, 0))
        copied = copy.deepcopy(engine.module)
        torch.save(engine.module.state_dict(), io.BytesIO())
        assert all(
            module._compiled_call_impl is None and "forward" not in module.__dict__
            for module in copied.modules()
        )
        assert torch.equal(copied(data(0, 0)), wanted)
        with torch.no_grad():
            engine.module.head.weight.zero_()
        assert engine(data(0, 0)) != wanted == copied(data(0, 0))


def evaluated(stage: int) -> None:
    """Evaluation between steps: another graph without gradients, and the same numbers."""
    torch._dynamo.reset()
    engine = engine_of(model(), stage)
    engine.compile("aot_eager")
    train(engine, data, STEPS, mean=False)
    with torch.no_grad():
        loss = engine(data(7, 0))
    engine.destroy()
    assert abs(loss - engine.module(data(7, 0))) < 1e-12


@pytest.mark.slow
def test_evaluation() -> None:
    run_ranks(2, evaluated, 3)


# -- passes ----------------------------------------------------------------------------------------


def test_passes_run_in_order_and_by_schedule(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    ran: list[str] = []

    def note(name: str) -> Any:
        def change(graph: Any, inputs: Any) -> Any:
            ran.append(name)
            return graph

        return change

    section = {"deepcompile": True, "debug_log": True}
    with (
        one_process_engine(model(), small(compile=section)) as engine,
        caplog.at_level(logging.INFO),
    ):
        engine.register_compile_pass("a", note("a"))
        engine.compile("aot_eager", schedule=[(0, ["a", note("b")]), (2, ["a"])])
        train(engine, data, STEPS, mean=False)
        assert ran == ["a", "b", "a"]
        assert (
            "graph as captured" in caplog.text
            and "graph after a" in caplog.text
            and "tanh" in caplog.text
        )


@pytest.mark.slow
def test_a_pass_changes_what_is_calculated() -> None:
    def linear(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target in (torch.tanh, "tanh"):
                node.replace_all_uses_with(node.args[0])
        return graph

    torch._dynamo.reset()
    with one_process_engine(model(), small(compile={"deepcompile": True})) as engine:
        before = engine(data(0, 0))
        engine.compile("aot_eager", schedule=[(0, [linear])])
        assert abs(engine(data(0, 0)) - before) > 1e-6


def test_a_pass_of_the_whole_model() -> None:
    """It gets all of it in one graph, and a graph break is an error."""

    def whole(graph: Any, inputs: Any) -> Any:
        found.append(
            sum(
                node.target is nn.functional.scaled_dot_product_attention
                for node in graph.graph.nodes
            )
        )
        return graph

    whole.whole = True  # type: ignore[attr-defined]
    found: list[int] = []
    torch._dynamo.reset()
    with one_process_engine(model(), small(compile={"deepcompile": True})) as engine:
        engine.compile("aot_eager", schedule=[(0, [whole])])
        engine(data(0, 0))
        assert found == [3]
        engine.module.head.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            engine(data(0, 0))
    with one_process_engine(
        model(), small(compile={"deepcompile": True, "modules": ["Block"]})
    ) as engine:
        with pytest.raises(UsageError, match="need the graph of the whole model"):
            engine.compile("aot_eager", schedule=[(0, [whole])])


def staged(stage: int, name: str) -> None:
    engine = engine_of(model(), stage, compile={"deepcompile": True, "passes": [name]})
    try:
        engine.compile("aot_eager")
    finally:
        engine.destroy()


def test_passes_of_zero_are_for_its_stages() -> None:
    pytest.importorskip("ds_zero")
    run_ranks(1, staged, 2, "z1")
    run_ranks(1, staged, 3, "z3")
    with pytest.raises(
        Exception, match="'z3' is for zero_optimization.stage 3, and the stage is 2"
    ):
        run_ranks(1, staged, 2, "z3")


# -- keys and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"passes": ["z3"]}, "passes run only with deepcompile: true"),
        (
            {"deepcompile": True, "passes": ["z9"]},
            r"passes\[0\]: no compile pass is called 'z9'.*there are: ",
        ),
        (
            {"deepcompile": True, "passes": ["z3"]},
            r"passes\[0\]: compile pass 'z3' is of dscore-zero.*give its section",
        ),
        ({"offload_activation": True}, "cpu_checkpointing keeps activations in host memory"),
        ({"offload_opt_states": True}, "offload_optimizer keeps them there"),
        ({"offload_parameters": True}, "offload_param keeps them there"),
        ({"symmetric_memory": True}, "symmetric memory"),
        ({"schedule": []}, "schedule"),
    ],
)
def test_wrong_sections(section: dict[str, Any], why: str) -> None:
    import ds_core

    with pytest.raises(ConfigError, match=why):
        ds_core.initialize(model=model(), config=small(compile=section))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"compiled_autograd_enabled": True}, "compiled_autograd_enabled"),
        ({"schedule": [(0, [])]}, '"deepcompile": true'),
    ],
)
def test_wrong_arguments(options: dict[str, Any], why: str) -> None:
    with one_process_engine(model(), small()) as engine, pytest.raises(UsageError, match=why):
        engine.compile("aot_eager", **options)


def cuda_graphs() -> None:
    engine = engine_of(model(), 3)
    for kwargs in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
        with pytest.raises(UsageError, match="CUDA graphs need weights at fixed addresses"):
            engine.compile("inductor", kwargs)
    engine.destroy()


def test_cuda_graphs_and_sharded_weights() -> None:
    pytest.importorskip("ds_zero")
    run_ranks(2, cuda_graphs)


def test_deepcompile_without_compile_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with one_process_engine(model(), small(compile={"deepcompile": True})) as engine:
        train(engine, data, STEPS, mean=False)
    assert caplog.text.count("nothing is compiled: call engine.compile()") == 1


def waiting(section: dict[str, Any], wanted: int) -> None:
    """How often the device is waited for in a step of stage 3 is what the keys say."""
    from ds_core.accelerator import get_accelerator
    from ds_core.comm.interceptor import (
        Collective,
        Interceptor,
        add_interceptor,
        interceptors,
        reset,
    )

    class Counts(Interceptor):
        order = 15  # type: ignore[assignment]

        def around(self, collective: Collective, call: Any) -> Any:
            ops.append(collective.op)
            return call()

    ops: list[str] = []
    waits = 0

    def synchronize() -> None:
        nonlocal waits
        waits += 1

    engine = engine_of(model(), 3, compile=section)
    assert sum(type(i).__name__ == "Waits" for i in interceptors()) == bool(section)
    add_interceptor(Counts())
    accelerator: Any = get_accelerator()
    vars(accelerator)["synchronize"] = synchronize
    try:
        engine.backward(engine(data(0, comm.rank())))
        engine.step()
    finally:
        del vars(accelerator)["synchronize"]
    gathers = ops.count("all_gather_into_tensor")
    reduces = len(ops) - ops.count("all_gather_into_tensor")
    assert waits == (wanted & 1) * reduces + (wanted >> 1) * gathers and min(gathers, reduces) > 1
    engine.destroy()
    reset()


def test_waits_around_collectives() -> None:
    pytest.importorskip("ds_zero")
    run_ranks(2, waiting, {}, 0)
    run_ranks(2, waiting, {"sync_before_reduce": True}, 1)
    run_ranks(2, waiting, {"sync_after_allgather": True}, 2)
