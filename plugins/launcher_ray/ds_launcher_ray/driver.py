"""``python -m ds_launcher_ray.driver``: places one agent on each node, and brings what they write
until all have ended.

The settings come on standard input, which stays open as long as the launcher lives. When this
process ends, however it does, Ray ends its actors; their agents then hear no more and end their
ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from ds_command_kit.hosts import agent_command, settings_line
from ds_command_kit.hosts.settings import Settings, read_settings
from ds_command_kit.show import CommandError, say_error

from ds_core.errors import CommError, DSError
from ds_launcher_ray import node
from ds_launcher_ray.choice import Wanted, bundles, devices

POLL_SECONDS = 2.0
PATIENCE = 5.0  # after so many seconds of waiting for nodes, say so
# as the agents among themselves: a host that does not answer for so long is lost
SILENCE_SECONDS = 16.0
# after the first failure: how long the other agents may take to notice it by themselves
OTHERS_SECONDS = 20.0


def main() -> None:
    """Run as the driver; ends with the run's exit code."""
    words = _words()
    try:
        code = _run(words)
    except DSError as error:
        say_error(str(error))
        code = 2 if isinstance(error, CommandError) else 1
    sys.stdout.flush()
    sys.exit(code)


def _words(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="--launcher-args of the launcher ray", allow_abbrev=False)
    parser.add_argument("--host", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument(
        "--address",
        default="",
        help="of the cluster; else RAY_ADDRESS, else the one of this machine",
    )
    parser.add_argument(
        "--cpus", type=float, default=1.0, help="Ray's CPUs to reserve on each host"
    )
    parser.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="NAME=AMOUNT",
        help="more to reserve on each host",
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="for nodes that are taken"
    )
    return parser.parse_args(args)


def _run(words: argparse.Namespace) -> int:
    settings = read_settings(sys.stdin.buffer.readline().strip())
    gone = threading.Event()
    threading.Thread(target=_lifeline, args=(gone,), name="lifeline", daemon=True).start()
    ray = _connect(words.address)
    try:
        wanted = _wanted(words, settings)
        asked = bundles(ray.nodes(), wanted)
        nodes = _place(ray, asked, words.wait, gone)
        names = _start(ray, nodes, settings, wanted, asked)
        grace = max(settings.request.grace, settings.request.notice)
        return _Watch(ray, nodes, names, grace, gone).run()
    except ray.exceptions.RayError as error:
        raise CommError(f"ray: {_line(error)}") from error
    finally:
        ray.shutdown()


def _lifeline(gone: threading.Event) -> None:
    """Line breaks come as long as the launcher lives."""
    while os.read(0, 4096):
        pass
    gone.set()


def _connect(address: str) -> Any:
    import ray

    place = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=place, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        fix = "run this on a node of a cluster (`ray start`), or set RAY_ADDRESS"
        raise CommError(
            f"no Ray cluster can be reached at {place!r}: {_line(error)}; {fix}"
        ) from error
    return ray


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _wanted(words: argparse.Namespace, settings: Settings) -> Wanted:
    """What the words of the command line ask for."""
    request = settings.request
    resources = {}
    for text in words.resource:
        name, _, amount = text.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            raise CommandError(f"--resource {text!r} is not NAME=AMOUNT") from None
    hosts = tuple(
        (name, int(slots or 0)) for name, _, slots in (text.rpartition("=") for text in words.host)
    )
    return Wanted(hosts, request.min_nodes, request.nproc or 0, words.cpus, resources)


def _place(
    ray: Any, asked: list[dict[str, float]], wait: float, gone: threading.Event
) -> list[Any]:
    """An actor in each bundle, each on a node of its own."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group(asked, strategy="STRICT_SPREAD")
    start = time.monotonic()
    told = False
    while not group.wait(1):
        waited = time.monotonic() - start
        if waited > wait or gone.is_set():
            raise CommError(
                f"the Ray cluster had no {len(asked)} nodes free with {asked[0]} within {wait:g} "
                "s; `ray status` shows "
                "what is taken; --launcher-args '--wait SECONDS' waits longer"
            )
        if waited > PATIENCE and not told:
            told = True
            say_error(f"waiting for {len(asked)} nodes of the Ray cluster with {asked[0]}")
    ray.cloudpickle.register_pickle_by_value(node)
    kind = ray.remote(max_concurrency=2)(node.Node)  # `end` can be called while `read` waits
    return [
        kind.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            resources={
                name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")
            },
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index, bundle in enumerate(asked)
    ]


def _start(
    ray: Any, nodes: list[Any], settings: Settings, wanted: Wanted, asked: list[dict[str, float]]
) -> list[str]:
    """Start the agents; gives the names of their hosts."""
    places: list[tuple[str, str]] = ray.get([one.place.remote() for one in nodes])
    request = dataclasses.replace(
        settings.request,
        hosts=(),
        min_nodes=len(nodes),
        max_nodes=len(nodes),
        master_addr=settings.request.master_addr or places[0][1],
        exported=tuple(settings.variables.items()),
    )
    started = []
    for number, (one, bundle) in enumerate(zip(nodes, asked, strict=True)):
        slots = wanted.hosts[number][1] if wanted.hosts else 0
        own = dataclasses.replace(request, nproc=devices(bundle) or slots or request.nproc)
        words = agent_command(own, number, settings="stdin", lifeline=True)
        started.append(one.start.remote(words, settings_line(own)))
    for (name, address), why in zip(places, ray.get(started), strict=True):
        if why:
            raise CommError(
                f"host {name} ({address}) cannot run this Python: {why}; the same path must lead "
                "to it there"
            )
    return [f"{name} ({address})" for name, address in places]


class _Watch:
    """Brings the output of all agents until they have ended.

    names: of their hosts.
    """

    def __init__(
        self, ray: Any, nodes: list[Any], names: list[str], grace: float, gone: threading.Event
    ) -> None:
        self.ray = ray
        self.nodes = nodes
        self.names = names
        self.grace = grace
        self.gone = gone
        self.waiting: dict[Any, tuple[int, float]] = {}  # an answer to come -> whose, asked for at
        self.code = 0  # of the first that ended badly
        self.lost: list[str] = []
        self.told = False  # an agent has said whom it lost
        self.deadline = float("inf")  # when to ask who is left to end

    def run(self) -> int:
        """The exit code of the first agent that ended badly, or 0."""
        for at in range(len(self.nodes)):
            self._read(at)
        asked = False
        while self.waiting:
            for answer in self.ray.wait(list(self.waiting), timeout=1.0)[0]:
                at, _ = self.waiting.pop(answer)
                if self._take(answer, at):
                    self._read(at)
            now = time.monotonic()
            for answer, (at, since) in list(self.waiting.items()):
                if now > since + SILENCE_SECONDS:  # Ray itself would wait for minutes
                    del self.waiting[answer]
                    self._lost(at, f"silent for {SILENCE_SECONDS:g} s")
            if now > self.deadline or (self.gone.is_set() and not asked):
                for at, _ in self.waiting.values():
                    self._ask(self.nodes[at], by_force=asked)
                asked = True
                self.deadline = now + self.grace + 10.0
        if self.lost and not self.told:
            say_error("; ".join(self.lost))
        return self.code

    def _read(self, at: int) -> None:
        self.waiting[self.nodes[at].read.remote(POLL_SECONDS)] = at, time.monotonic()

    def _lost(self, at: int, why: str) -> None:
        """A host is gone: the others may not hear of it from each other."""
        self.lost.append(f"lost host {self.names[at]}: {why}")
        self.code = self.code or 1
        self.deadline = min(self.deadline, time.monotonic() + 1.0)

    def _take(self, answer: Any, at: int) -> bool:
        """Write what an agent wrote; whether there may be more."""
        try:
            output, code = self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            self._lost(at, _line(error))
            return False
        for target, text in output:
            self.told = self.told or b"dscore: lost " in text
            with contextlib.suppress(OSError):  # the reader has gone
                _write(target, text)
        if code:
            self.code = self.code or (code if code > 0 else 128 - code)
            self.deadline = min(self.deadline, time.monotonic() + OTHERS_SECONDS)
        return code is None

    def _ask(self, one: Any, by_force: bool) -> None:
        if by_force:
            self.ray.kill(one)
        else:
            one.end.remote()


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


if __name__ == "__main__":
    main()
