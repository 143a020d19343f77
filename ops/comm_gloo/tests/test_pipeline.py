"""The order in which a pipeline starts and resumes blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from ds_comm_gloo.pipeline import Pipeline, Stages

PATIENCE = 20.0


class Message:
    """On its way until `there` is set. waited: set when somebody waits for it."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.waited = threading.Event()

    def wait(self) -> None:
        self.waited.set()
        assert self.there.wait(PATIENCE), "nobody let it come"


def block(messages: list[Message], began: Callable[[], None] = lambda: None) -> Stages:
    began()
    for message in messages:
        yield [message]


def test_a_collective_begins_while_the_last_blocks_of_the_one_before_are_on_the_wire() -> None:
    first = Message()
    second = Message()
    pipeline = Pipeline(lambda mine: mine)
    one = pipeline.run(lambda: [block([first]), block([second])], True, False)
    assert first.waited.wait(PATIENCE)
    # The other one comes while the first block is waited for; its beginning lets the second block
    # end.
    last = Message()
    last.there.set()
    other = pipeline.run(lambda: [block([last], second.there.set)], True, False)
    first.there.set()
    assert one is not None
    assert other is not None
    one.wait()
    other.wait()


def test_later_messages_of_a_block_are_waited_for_behind_the_first_ones_of_the_others() -> None:
    order: list[str] = []

    def told(name: str) -> Iterator[Message]:
        for stage in range(2):
            message = Message()
            message.there.set()
            message.wait = lambda stage=stage: order.append(f"{name}{stage}")  # type: ignore[method-assign,misc]
            yield message

    Pipeline(lambda mine: mine).run(
        lambda: [block(list(told("a"))), block(list(told("b")))], False, False
    )
    assert order == ["a0", "b0", "a1", "b1"]
