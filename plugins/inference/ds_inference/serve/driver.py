"""Commands to the generator: the same on every rank that has a part of the model.

Commands are what JSON can represent, since rank 0 sends them to the others before each step
(`Link`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ds_inference.generate.requests import Output, Request, SamplingParams

if TYPE_CHECKING:
    from ds_inference.generate.generator import Generator
    from ds_inference.generate.requests import Handle

Command = list[Any]
Link = Callable[[list[Command]], list[Command]]
"""Gives the commands of rank 0 to all ranks, and waits for them there."""

STOP: Command = ["stop"]
_USUAL = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def submit(number: int, prompt: Sequence[int], params: SamplingParams) -> Command:
    """Answer `prompt` under this number."""
    # Only what differs from the default: most requests set two or three of twenty fields.
    said = {
        name: value for name, usual in _USUAL.items() if (value := getattr(params, name)) != usual
    }
    return ["submit", number, list(prompt), said]


def cancel(number: int) -> Command:
    """Give up the answer of this number."""
    return ["cancel", number]


class Driver:
    """Runs `generator` by commands, in one thread.

    refused: called with number and error where a request is not accepted.
    """

    def __init__(
        self,
        generator: Generator,
        refused: Callable[[int, Exception], None] = lambda number, error: None,
    ) -> None:
        self.generator = generator
        self._refused = refused
        # Numbers are rank 0's, equal on all ranks; handles are each rank's own.
        self._handles: dict[int, Handle] = {}
        self._numbers: dict[int, int] = {}  # by identity of the handle

    @property
    def open(self) -> int:
        """Answers that have not ended."""
        return len(self._handles)

    def obey(self, commands: Sequence[Command]) -> bool:
        """Carry out `commands`; False: one of them was to stop."""
        for word, *rest in commands:
            if word == "stop":
                return False
            elif word == "submit":
                self._submit(*rest)
            elif (handle := self._handles.pop(rest[0], None)) is not None:
                # First of all, so that a later handle in the same memory is not taken for this one.
                del self._numbers[id(handle)]
                self.generator.cancel(handle)
        return True

    def step(self) -> list[tuple[int, Output]]:
        """What a step brings, with the numbers of its answers."""
        found = []
        for output in self.generator.step() if self.generator.busy else ():
            # None: it was cancelled in this step's commands.
            number = self._numbers.get(id(output.handle))
            if number is not None:
                found.append((number, output))
                if output.finished is not None:
                    del self._numbers[id(self._handles.pop(number))]
        return found

    def _submit(self, number: int, prompt: list[int], said: dict[str, Any]) -> None:
        try:
            handle = self.generator.submit(Request(prompt, SamplingParams(**said)))
        except Exception as error:  # whatever it is, it is this request's alone
            self._refused(number, error)
            return
        self._handles[number] = handle
        self._numbers[id(handle)] = number


def follow(generator: Generator, link: Link) -> None:
    """Run on a rank other than 0: carry out the commands of rank 0, until it stops."""
    driver = Driver(generator)
    # Rank 0 decides what is done, the same deterministic scheduler on each rank decides which rows
    # a step has: nothing else needs to be sent.
    while driver.obey(link([])):
        driver.step()
