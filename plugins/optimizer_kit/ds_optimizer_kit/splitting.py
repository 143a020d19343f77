"""Parameter groups that are split by what their parameters are, alike on all ranks.

The stages of a pipeline have different parameters, and one may have none of a kind. Its group of
that kind is empty then: checkpoints and schedules count groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ds_core import comm

Groups = list[dict[str, Any]]


def split_alike(
    groups: Iterable[Mapping[str, Any]],
    split: Callable[[Sequence[Mapping[str, Any]]], Groups],
    keys: Sequence[str],
    order: Callable[[Sequence[Any]], Any],
) -> Groups:
    """What `split` makes of each group on any rank. Collective.

    keys: of the groups that `split` makes, which say of which kind they are.
    order: of the kinds of one group, by the values of `keys`.
    """
    given = [dict(group) for group in groups]
    mine = [split([group]) for group in given]
    kinds = [[[made[key] for key in keys] for made in found] for found in mine]
    everyone = comm.all_gather_json(kinds)
    alike: Groups = []
    for index, group in enumerate(given):
        own = {tuple(kind): made for kind, made in zip(kinds[index], mine[index], strict=True)}
        wanted = {tuple(kind) for rank in everyone for kind in rank[index]}
        for kind in sorted(wanted, key=order):
            empty = {**group, "params": [], **dict(zip(keys, kind, strict=True))}
            alike.append(own.get(kind, empty))
    return alike
