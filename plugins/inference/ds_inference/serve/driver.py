"""What is done with the generator, by commands: the same on every rank that has a part of the
model.

Commands are what JSON can hold, since rank 0 hands them to the others before each step (`Link`).
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
    said = {
        name: value for name, usual in _USUAL.items() if (value := getattr(params, name)) != usual
    }
    return ["submit", number, list(prompt), said]


def cancel(number: int) -> Command:
    """The answer of this number is not wanted any more."""
    return ["cancel", number]


class Driver:
    """Drives `generator`, in one thread. refused: called with number and error where a request is
    not taken.
    """

    def __init__(
        self,
        generator: Generator,
        refused: Callable[[int, Exception], None] = lambda number, error: None,
    ) -> None:
        self.generator = generator
        self._refused = refused
        self._handles: dict[int, Handle] = {}
        self._numbers: dict[int, int] = {}  # by identity of the handle

    @property
    def open(self) -> int:
        """Answers that have not ended."""
        return len(self._handles)

    def obey(self, commands: Sequence[Command]) -> bool:
        """Do what is asked for; False: end."""
        for word, *rest in commands:
            if word == "stop":
                return False
            elif word == "submit":
                self._submit(*rest)
            elif (handle := self._handles.pop(rest[0], None)) is not None:
                del self._numbers[id(handle)]
                self.generator.cancel(handle)
        return True

    def step(self) -> list[tuple[int, Output]]:
        """What a step brings, with the numbers of its answers."""
        found = []
        for output in self.generator.step() if self.generator.busy else ():
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
    """What ranks other than 0 do: the same as it, until it stops."""
    driver = Driver(generator)
    while driver.obey(link([])):
        driver.step()
