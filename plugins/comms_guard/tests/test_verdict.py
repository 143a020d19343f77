"""What positions of waiting ranks prove, and what they do not."""

from __future__ import annotations

import functools
import json

from ds_comms_guard.verdict import Activity, GroupHistory, Position, prove

WORLD = (0, 1, 2)


def calls(*texts: str, members: tuple[int, ...] = WORLD, first: int = 1) -> GroupHistory:
    made = tuple((first + i, hash(texts[: i + 1]), text) for i, text in enumerate(texts))
    return GroupHistory(members, first + len(texts) - 1, made)


def at(
    rank: int, wait: tuple[str, int] | None = None, ended: str = "", **groups: GroupHistory
) -> Position:
    return Position(rank, 1, groups, wait, ended=ended)


def found(*positions: Position, size: int = 3) -> str:
    proof = prove({p.rank: p for p in positions}, size)
    return proof.text if proof is not None else ""


def test_different_collectives_under_one_number_are_a_proof_whoever_else_runs() -> None:
    proof = prove({0: at(0, ("g", 2), g=calls("a", "b")), 2: at(2, ("g", 2), g=calls("a", "c"))}, 3)
    assert proof is not None and proof.certain
    assert "rank 0: b" in proof.text and "rank 2: c" in proof.text


def test_the_first_difference_is_told() -> None:
    text = found(at(0, ("g", 3), g=calls("a", "b", "x")), at(1, ("g", 3), g=calls("a", "c", "x")))
    assert "rank 0: b" in text and "rank 1: c" in text and ": x" not in text


def test_ranks_of_one_kind_are_named_together() -> None:
    text = found(*(at(r, ("g", 1), g=calls("a" if r < 2 else "b")) for r in WORLD))
    assert "ranks 0, 1: a" in text and "rank 2: b" in text


def test_waiting_for_a_rank_that_runs_proves_nothing() -> None:
    assert not found(at(0, ("g", 2), g=calls("a", "b")), at(1, ("g", 2), g=calls("a", "b")))


def test_waiting_for_one_that_waits_for_one_that_runs_proves_nothing() -> None:
    g = calls("a", members=(0, 1))
    h = calls("b", members=(1, 2))
    assert not found(at(0, ("g", 1), g=g), at(1, ("h", 1), h=h, g=calls(members=(0, 1))))


def test_all_have_come_so_it_is_under_way() -> None:
    assert not found(*(at(r, ("g", 1), g=calls("a")) for r in WORLD))


def test_two_that_wait_for_each_other_on_two_groups() -> None:
    pair = functools.partial(calls, members=(0, 1))
    proof = prove(
        {0: at(0, ("g", 1), g=pair("a"), h=pair()), 1: at(1, ("h", 1), g=pair(), h=pair("b"))},
        2,
    )
    assert proof is not None and not proof.certain and list(proof.waiting) == [0, 1]
    assert "rank 0 waits for a, to which rank 1 has not come" in proof.text


def test_waiting_for_a_rank_that_has_ended() -> None:
    text = found(
        at(0, ("g", 2), g=calls("a", "b")), at(1, ended="ValueError: boom", g=calls("a")), size=2
    )
    assert "rank 1 has ended (ValueError: boom)" in text and "rank 0 waits for b" in text


def test_the_ended_rank_had_come() -> None:
    pair = functools.partial(calls, members=(0, 1))
    assert not found(at(0, ("g", 1), g=pair("a")), at(1, ended="over", g=pair("a")), size=2)


def test_where_ways_part_is_told() -> None:
    activities = [
        (Activity("in forward of 'c'", 4, ("a", "b", "c")),),
        (Activity("", 4, ("a", "c")),),
    ]
    text = found(
        *(
            Position(r, 1, {"g": calls("ab"[r])}, ("g", 1), "train.py:3", activities[r])
            for r in range(2)
        ),
        size=2,
    )
    assert "after a, rank 0 came to b, and rank 1 to c" in text
    assert "rank 0: a, in forward of 'c', at train.py:3" in text


def test_one_rank_has_gone_through_more_often() -> None:
    text = found(
        *(
            Position(r, 1, {"g": calls("ab"[r])}, ("g", 1), "", (Activity("", 4 + r),))
            for r in range(2)
        )
    )
    assert "rank 0 has gone through the model 4 times, rank 1 5 times" in text


def test_a_rank_at_the_end_of_the_pass_is_compared_by_that_pass() -> None:
    ended = Activity("", 5, (), ("a", "b", "d"))
    inside = Activity("", 4, ("a", "c"), ("a", "b", "d"))
    for pair in ((ended, inside), (inside, ended)):
        told = found(
            *(Position(r, 1, {"g": calls("ab"[r])}, ("g", 1), "", (pair[r],)) for r in range(2))
        )
        b, c = ("b", "c") if pair[0] is ended else ("c", "b")
        assert f"after a, rank 0 came to {b}, and rank 1 to {c}" in told
    even = Activity("", 4, ("a", "b", "d"))
    told = found(
        *(
            Position(r, 1, {"g": calls("ab"[r])}, ("g", 1), "", ((ended, even)[r],))
            for r in range(2)
        )
    )
    assert "rank 0 has gone through the model 5 times, rank 1 4 times" in told


def test_positions_survive_json() -> None:
    position = Position(
        2,
        7,
        {"g": calls("a", "b")},
        ("g", 2),
        "x.py:1",
        (Activity("p", 1, ("a",), ("b", "a")),),
        "",
    )
    assert Position.from_json(json.loads(json.dumps(position.as_json()))) == position
    ended = at(1, ended="over")
    assert Position.from_json(json.loads(json.dumps(ended.as_json()))) == ended


def test_windows_that_do_not_overlap_prove_nothing_by_difference() -> None:
    assert not found(
        at(0, ("g", 9), g=calls("y", first=9)), at(1, ("g", 2), g=calls("a", "b")), size=3
    )
