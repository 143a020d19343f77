"""The composition matrix: what it covers, a few of its rows, and those that once were wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import matrix
import table
import verdicts
from ds_testing import run_ranks
from ds_testing.kits.matrix.covering import Combination, Rules, combinations, cover, held
from features import FEATURES, NAMES, possible

# What the matrix found, and was repaired.
FOUND = {
    "a stage without experts": "pp=1f1b ep=ep stage=z1",
    "groups that a stage has no parameters of": (
        "stage=z2 offload=optimizer tp=tp pp=zero_bubble optimizer=Muon trained=frozen groups=two "
        "moved=stage"
    ),
    "experts under autocast": "ep=experts precision=autocast",
    "frozen parameters in tiles, gathered for each module": "trained=thawed stage=z3 sp=tiled",
    "experts in compiled blocks": "compile=at_start ep=ep tp=tp stage=z3",
    "collectives in compiled blocks": "compile=at_start sp=ulysses stage=z3",
    "elements that were rounded by where they stand": (
        "stage=z1 sp=ring ep=experts pp=1f1b optimizer=Muon gas=4"
    ),
    "norms of tied weights that stages cut elsewhere": "stage=z1 pp=1f1b optimizer=Lamb gas=4",
    "tied weights in blocks of 8 bits": "stage=z2 pp=1f1b optimizer=AdamW8bit",
    "groups of matrices that a stage has none of": (
        "stage=z1 pp=1f1b optimizer=Shampoo trained=frozen moved=same"
    ),
    "directions that no gradient of an expert has (GaLore)": (
        "stage=z2 sp=ring ep=ep optimizer=GaLore gas=1 trained=thawed"
    ),
    "directions that no gradient of an expert has (Dion)": (
        "stage=z3 sp=ulysses ep=experts pp=zero_bubble optimizer=Dion gas=1"
    ),
    "dropout that a replay counts anew": "trained=thawed random=dropout replay=replayed",
}
SAMPLE = {
    "many at once": "stage=z3 offload=param tp=tp optimizer=AdamMini clip=clip trained=thawed gas=1",
    "on disk, with random numbers": "offload=nvme stage=z3 optimizer=SOAP tp=tp random=dropout",
    "in bf16": "stage=z2 sp=ulysses precision=bf16 groups=two schedule=warmup recompute=blocks",
}


@pytest.mark.fast_cases("many at once")
@pytest.mark.parametrize("name", [*SAMPLE, *FOUND])
def test_a_row_trains_as_one_process(name: str, tmp_path: Path) -> None:
    row = matrix.row_of({**SAMPLE, **FOUND}[name])
    verdict = verdicts.judge(run_ranks, row, tmp_path)
    assert verdict["kind"] in table.GOOD, verdict


# The last was once given compiled code of the others' classes, divided in another way.
IN_TURN = (
    (
        "tp=tp sp=tiled pp=interleaved optimizer=Lamb precision=bf16 gas=4 trained=thawed "
        "compile=at_start comm=overlap moved=same routing=curriculum"
    ),
    (
        "stage=z3 offload=optimizer ep=ep pp=zero_bubble optimizer=Lamb "
        "precision=autocast gas=1 trained=thawed compile=at_start wires=hpZ "
        "routing=curriculum"
    ),
    (
        "sp=ulysses ep=experts pp=zero_bubble optimizer=ScheduleFreeAdamW clip=clip gas=4 "
        "trained=thawed groups=two recompute=in_parts compile=at_start moved=stage "
        "routing=curriculum"
    ),
    (
        "stage=z2 offload=super sp=tiled pp=interleaved optimizer=Adagrad "
        "precision=autocast clip=clip trained=thawed groups=two recompute=in_parts "
        "compile=at_start comm=overlap routing=curriculum"
    ),
)


@pytest.mark.slow
def test_engines_of_one_process_leave_each_other_no_compiled_code(tmp_path: Path) -> None:
    for number, text in enumerate(IN_TURN):
        verdict = verdicts.judge(run_ranks, matrix.row_of(text), tmp_path / str(number))
        assert verdict["kind"] == "exact", (text, verdict)


def test_a_wrong_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trial

    plainly = trial.plainly

    def planted(row: matrix.Row, total: int) -> trial.Trained:
        losses, weights = plainly(row, total)
        weights["layers.2.mlp.up_proj.weight"][0, 0] += 1e-6
        return losses, weights

    monkeypatch.setattr(trial, "plainly", planted)
    verdict = verdicts.judge(run_ranks, matrix.row_of("stage=z1"), tmp_path)
    assert (verdict["kind"], verdict["worst"]) == ("wrong", "layers.2.mlp.up_proj.weight")


def test_refused_pairs_are_refused_by_messages_that_name_both() -> None:
    for entry in table.read(table.REFUSED):
        pair = table.pair_of(entry)
        assert entry["names both"], entry
        if entry["by"] != "config":
            continue  # `initialize` refuses it: test_pairs_that_initialize_refuses
        others = [other for other in matrix.known() if other != pair]
        row = Rules(NAMES, others, possible).complete(dict(pair))
        assert row is not None, pair
        message = verdicts.refusal(row)
        assert message, (
            f"{sorted(pair)} is no longer refused: python tests/matrix/matrix.py --learn"
        )
        assert verdicts.names_both(pair, message), message


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [table.pair_of(entry) for entry in table.read(table.REFUSED) if entry["by"] != "config"],
    ids=lambda pair: " ".join("=".join(choice) for choice in sorted(pair)),
)
def test_pairs_that_initialize_refuses(pair: Combination, tmp_path: Path) -> None:
    others = [other for other in matrix.known() if other != pair]
    row = Rules(NAMES, others, possible).complete(dict(pair))
    assert row is not None
    verdict = verdicts.judge(run_ranks, row, tmp_path)
    assert verdict["kind"] == "refused", verdict
    assert verdicts.names_both(pair, verdict["message"]), verdict["message"]


def test_every_pair_has_a_verdict() -> None:
    assert sorted(map(sorted, table.without_verdict())) == []


def test_the_page_is_that_of_the_verdicts() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), (
        "run python tests/matrix/matrix.py --write"
    )


# -- the rows --------------------------------------------------------------------------------------

SMALL = {"a": ["1", "2", "3"], "b": ["1", "2"], "c": ["1", "2", "3", "4"], "d": ["1", "2"]}
BAD = frozenset({("a", "2"), ("c", "3")})


@pytest.mark.parametrize("strength", [2, 3])
def test_rows_hold_every_combination_that_is_allowed(strength: int) -> None:
    rules = Rules(SMALL, [BAD], lambda row: (row.get("b"), row.get("d")) != ("2", "2"))
    rows = cover(rules, combinations(SMALL, strength))
    found = {some for row in rows for some in held(row, strength)}
    possible_ones = {
        some
        for some in combinations(SMALL, strength)
        if not some >= BAD and not some >= {("b", "2"), ("d", "2")}
    }
    assert found == possible_ones
    assert all(row.keys() == SMALL.keys() for row in rows)
    assert rows == cover(rules, combinations(SMALL, strength))


def test_few_rows_hold_every_pair_of_the_features() -> None:
    rules = Rules(NAMES, matrix.known(), possible)
    rows = cover(rules, combinations(NAMES, 2))
    assert 50 <= len(rows) <= 120
    assert all(rules.allow(row) for row in rows)
    seen = {(name, value) for row in rows for name, value in row.items()}
    assert seen == {(name, value) for name, values in FEATURES.items() for value in values}


def test_what_cannot_be_completed_is_in_no_row() -> None:
    shut = [frozenset({("a", "1"), ("b", value)}) for value in SMALL["b"]]
    rules = Rules(SMALL, shut)
    assert rules.complete({"a": "1"}) is None
    assert rules.complete({"a": "2"}) == {"a": "2", "b": "1", "c": "1", "d": "1"}
    assert all(row["a"] != "1" for row in cover(rules, combinations(SMALL, 2)))
