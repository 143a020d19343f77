"""The conformance kit of `ds_rendezvous`: finding a process's place, and the store at which all
ranks meet.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

from ds_core.comm.start import Job, Rendezvous
from ds_core.entries import RendezvousEntry, resolve
from ds_testing.processes import free_port, start

SIZE = 3

RANK = """
import datetime
import torch
from ds_core import comm
from ds_core.errors import DSError
try:
    comm.init_distributed(**{arguments})
except DSError as error:
    print(error)
else:
    value = torch.tensor([comm.rank() + 1.0])
    comm.all_reduce(value)
    print(comm.rank(), comm.world_size(), comm.local_rank(), value.item())
    torch.distributed.destroy_process_group()
"""


def start_rank(variables: Mapping[str, str], **arguments: Any) -> subprocess.Popen[str]:
    """A process that calls ``init_distributed(**arguments)``; see `ds_testing.processes.output`.

    It prints its rank, the world size, its local rank and the sum of 1 + rank over all ranks; or
    the error message.
    """
    return start(RANK.format(arguments=arguments), **variables)


class RendezvousConformance:
    """Inherit, set `plugin` to the reference of the declaration module, and override `environment`.

    alone: variables of a process that belongs to no job.
    """

    plugin: str = ""
    alone: ClassVar[Mapping[str, str]] = {}

    def environment(self, rank: int, size: int) -> Mapping[str, str]:
        """The variables of one rank of a job of `size` ranks on this machine."""
        raise NotImplementedError

    def entry(self) -> RendezvousEntry:
        """What the plugin answers."""
        found: RendezvousEntry = resolve(self.plugin).ds_rendezvous()
        return found

    def test_a_process_alone_is_in_no_job(self) -> None:
        """`find` gives None where none of the job's variables is set."""
        entry = self.entry()
        both = set(entry.variables) & set(self.alone)
        assert not both, (
            f"{both} are set for a process alone; RendezvousEntry.variables are those of a job"
        )
        if entry.find is not None:
            found = resolve(entry.find)(self.alone)
            assert found is None, (
                f"a process without the job's variables is given {found}; answer None"
            )

    def test_ranks_find_their_places(self) -> None:
        """`find` gives each rank its number and the job's size, and one of `variables` is among
        those that are set.
        """
        entry = self.entry()
        for rank in range(SIZE) if entry.find is not None else ():
            env = self.environment(rank, SIZE)
            assert set(entry.variables) & set(env), (
                f"none of {entry.variables} is in environment(); find is never asked"
            )
            job = resolve(str(entry.find))(env)
            assert isinstance(job, Job), (
                f"find gives {job!r} in a job, not a ds_core.comm.start.Job"
            )
            assert job.source, "Job.source is empty; say whose variables these are"
            place = (int(job.variables["RANK"]), int(job.variables["WORLD_SIZE"]))
            assert place == (rank, SIZE), (
                f"rank {rank} of {SIZE} hears that it is rank {place[0]} of {place[1]}"
            )

    def test_ranks_meet_at_the_store(self) -> None:
        """All ranks open the store at once; what one sets, the others read."""
        entry = self.entry()
        if entry.store is None:
            return
        open_store = resolve(entry.store)
        port = free_port()

        def meet(rank: int) -> list[bytes]:
            store: Any = open_store(
                Rendezvous(rank, SIZE, "127.0.0.1", port, "the kit"), timedelta(seconds=60)
            )
            store.set(f"kit/{rank}", str(rank))
            found = [store.get(f"kit/{other}") for other in range(SIZE)]
            store.add("kit/read", 1)
            # rank 0 may hold the store: it leaves last
            while rank == 0 and store.add("kit/read", 0) < SIZE:
                pass
            return found

        with ThreadPoolExecutor(SIZE) as pool:
            assert list(pool.map(meet, range(SIZE))) == [[b"0", b"1", b"2"]] * SIZE
