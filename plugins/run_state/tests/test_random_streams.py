"""Named random streams: what is drawn in a stream, after it and again; on the CPU and with a
device's generator.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ds_run_state import rng
from ds_run_state.random_streams import MODEL_PARALLEL, STREAMS, RandomStreams

from ds_core.accelerator import CpuAccelerator

Draw = Callable[[], tuple[float, ...]]


@pytest.fixture(params=["cpu", "xpu"])
def device(request: pytest.FixtureRequest) -> tuple[RandomStreams, Draw]:
    """Streams of an accelerator, and how to draw from all of its generators."""
    if request.param == "cpu":
        return RandomStreams(CpuAccelerator()), lambda: (torch.rand(()).item(),)
    own = torch.Generator().manual_seed(7)
    accelerator: Any = SimpleNamespace(
        device_type="xpu",
        manual_seed=own.manual_seed,
        get_rng_state=own.get_state,
        set_rng_state=own.set_state,
    )
    return RandomStreams(accelerator), lambda: (
        torch.rand(()).item(),
        torch.rand((), generator=own).item(),
    )


def test_a_stream_is_its_seed_and_leaves_the_others_alone(
    device: tuple[RandomStreams, Draw],
) -> None:
    streams, draw = device
    streams.seed_model_parallel(5, 0)
    wanted = [draw() for _ in range(3)]
    streams.seed_model_parallel(5 + 2718 + 3, 0)
    inside = [draw() for _ in range(4)]

    streams.seed_model_parallel(5, 3)
    assert streams.seeds == {5 + 2718 + 3}
    got = [draw()]
    found = []
    with streams.fork():
        found += [draw(), draw()]
    got.append(draw())
    with pytest.raises(ZeroDivisionError), streams.fork():
        found.append(draw())
        raise ZeroDivisionError
    got.append(draw())
    with streams.fork():
        found.append(draw())
    assert (got, found) == (wanted, inside)


def test_nested_forks_go_on_where_the_stream_was_left(device: tuple[RandomStreams, Draw]) -> None:
    streams, draw = device
    streams.add("a", 1)
    start = streams.states()
    with streams.fork("a"):
        wanted = [draw() for _ in range(5)]
    streams.set_states(start)
    streams.add("b", 2)
    with streams.fork("a"):
        got = [draw()]
        with streams.fork("a"):
            got.append(draw())
        with streams.fork("b"):
            draw()
            with streams.fork("a"):
                got.append(draw())
        got.append(draw())
    with streams.fork("a"):
        got.append(draw())
    assert got == wanted


def test_replay_draws_the_same_again_and_disturbs_nothing(
    device: tuple[RandomStreams, Draw],
) -> None:
    streams, draw = device
    streams.seed_model_parallel(3, 1)

    def some() -> list[tuple[float, ...]]:
        with streams.fork():
            inner = [draw()]
        return [draw(), *inner]

    with streams.fork():
        draw()
        snapshot = streams.snapshot()
        first = some()
    after = streams.snapshot()
    with streams.replay(snapshot):
        assert some() == first
    again = streams.snapshot()
    assert torch.equal(after.current, again.current)
    assert torch.equal(after.states[MODEL_PARALLEL], again.states[MODEL_PARALLEL])


def test_errors_name_the_stream() -> None:
    streams = RandomStreams(CpuAccelerator())
    streams.add("a", 1)
    for name, seed in (("b", 1), ("a", 2)):
        with pytest.raises(
            ValueError, match=f"'{name}' with seed {seed}: the seed or the name is in use; choose"
        ):
            streams.add(name, seed)
    with (
        pytest.raises(ValueError, match="no random state 'b'; add it first, known: a"),
        streams.fork("b"),
    ):
        pass


def test_checkpoints_keep_the_streams(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = CpuAccelerator()

    def draw() -> float:
        with STREAMS.fork():
            return torch.rand(()).item()

    STREAMS.reset()  # engines with divided layers, of tests before, have begun some
    try:
        assert "streams" not in rng.capture(accelerator)
        STREAMS.seed_model_parallel(11, 0)
        draw()
        state = rng.capture(accelerator)
        wanted = draw()
        STREAMS.seed_model_parallel(12, 0)
        STREAMS.add("mine", 4)
        rng.restore(state, accelerator)
        assert draw() == wanted
        assert set(STREAMS.states()) == {MODEL_PARALLEL, "mine"}
        with pytest.raises(ValueError, match="in use"):
            STREAMS.add("other", 11 + 2718)
        rng.restore(
            {**state, "streams": {**state["streams"], "device": "cuda"}}, cast("Any", accelerator)
        )
        assert "random streams of cuda: those of cpu start from the seed" in caplog.text
        assert draw() != wanted
    finally:
        STREAMS.reset()
