from __future__ import annotations

from typing import Any

import pytest
from ds_data_sampling.config import DataEfficiency
from ds_data_sampling.curricula.config import LegacyCurriculum
from pydantic import ValidationError

LINEAR = {"total_curriculum_step": 100, "difficulty_step": 8}
METRIC: dict[str, Any] = {
    "index_to_sample_path": "a",
    "index_to_metric_path": "b",
    "difficulty_type": "value",
    "clustering_type": "schedule_based",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": LINEAR,
}
LTD: dict[str, Any] = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 16,
        "max_value": 64,
        "schedule_config": {"require_steps": 100, "seq_per_step": 16},
    },
}


def curriculum(**changes: Any) -> dict[str, Any]:
    metric = {k: v for k, v in (METRIC | changes).items() if v is not None}
    return {
        "data_sampling": {
            "curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": metric}}
        }
    }


def batching(**keys: Any) -> dict[str, Any]:
    return {"data_sampling": {"dynamic_batching": {"enabled": True, **keys}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (curriculum(min_difficulty=None), "min_difficulty must be given"),
        (curriculum(max_difficulty=4), "min_difficulty 8 is more than max_difficulty 4"),
        (curriculum(schedule_type="linear"), "fixed_linear"),
        (curriculum(schedule_type="fixed_root"), "fixed_root needs schedule_config.root_degree"),
        (
            curriculum(schedule_type="fixed_discrete", schedule_config={"difficulty": [8]}),
            "needs schedule_config.max",
        ),
        (
            curriculum(
                schedule_type="fixed_discrete",
                schedule_config={"difficulty": [8, 16], "max_step": [5, 9]},
            ),
            "max_step has 2 entries and difficulty has 2",
        ),
        (
            curriculum(
                schedule_type="fixed_discrete",
                schedule_config={"difficulty": [8, 9, 10], "max_step": [5, 5]},
            ),
            "max_step must increase",
        ),
        (
            curriculum(
                schedule_type="fixed_discrete",
                schedule_config={"difficulty": [8, 80], "max_step": [5]},
            ),
            "goes up to 80, more than max_difficulty 64",
        ),
        (curriculum(clustering_type=None), "clustering_type must be given"),
        (curriculum(index_to_sample_path=None), "schedule_based needs index_to_sample_path"),
        (curriculum(index_to_metric_path=None), "schedule_based needs index_to_metric_path"),
        (curriculum(difficulty_type="percentile", max_difficulty=128), "128 is no percentile"),
        (
            {"data_sampling": {"curriculum_learning": {"enabled": True}}},
            "curriculum_metrics must be given",
        ),
        (batching(), "max_tokens must be given"),
        (batching(max_tokens=0), "max_tokens"),
        (
            batching(max_tokens=8, min_batch_size=3, max_batch_size=2),
            "max_batch_size 2 is less than min_batch_size 3",
        ),
        ({"data_routing": {"random_ltd": {"enabled": True}}}, "total_layer_num must be given"),
        ({"data_routing": {"random_ltd": LTD | {"random_ltd_layer_num": 3}}}, "names 2 layers"),
        (
            {"data_routing": {"random_ltd": LTD | {"random_ltd_layer_id": [1, 1]}}},
            "names a layer twice",
        ),
        ({"data_routing": {"random_ltd": LTD | {"random_ltd_layer_id": [1, 4]}}}, "names layer 4"),
        (
            {"data_routing": {"random_ltd": {"layer_token_lr_schedule": {"enabled": True}}}},
            "unfinished",
        ),
    ],
)
def test_what_is_wrong_is_said(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DataEfficiency.model_validate({"enabled": True} | config)


def test_a_part_counts_only_where_those_around_it_are_on() -> None:
    inner = curriculum()
    assert DataEfficiency.model_validate({"enabled": True} | inner).curriculum is None
    inner["data_sampling"]["enabled"] = True
    assert DataEfficiency.model_validate(inner).curriculum is None
    assert DataEfficiency.model_validate({"enabled": True} | inner).curriculum is not None
    routing = {"data_routing": {"random_ltd": LTD}}
    assert DataEfficiency.model_validate({"enabled": True} | routing).random_ltd is None
    routing["data_routing"]["enabled"] = True
    assert DataEfficiency.model_validate({"enabled": True} | routing).random_ltd is not None


def remarks(section: Any) -> dict[str, str]:
    return dict(section.remarks({}))


def test_what_has_no_effect_is_remarked() -> None:
    assert remarks(DataEfficiency.model_validate({"data_sampling": {"enabled": True}})) == {
        "": "has no effect: enabled is false"
    }
    inner = curriculum(schedule_config=LINEAR | {"root_degree": 2})
    assert set(remarks(DataEfficiency.model_validate({"enabled": True} | inner))) == {
        "data_sampling"
    }
    inner["data_sampling"]["enabled"] = True
    (key,) = remarks(DataEfficiency.model_validate({"enabled": True} | inner))
    assert key.endswith("curriculum_metrics.seqlen.schedule_config.root_degree")


def test_the_legacy_section() -> None:
    keys = {
        "min_difficulty": 8,
        "max_difficulty": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": LINEAR,
    }
    assert not remarks(LegacyCurriculum.model_validate({"enabled": True} | keys))
    found = LegacyCurriculum.model_validate(
        {"enabled": True} | keys | {"schedule_config": LINEAR | {"difficulty_step": 4}}
    )
    assert "slow on GPUs" in remarks(found)["schedule_config.difficulty_step"]
    with pytest.raises(ValidationError, match="schedule_type must be given"):
        LegacyCurriculum.model_validate(
            {"enabled": True, "min_difficulty": 8, "max_difficulty": 64}
        )
    with pytest.raises(ValidationError, match="curriculum_type"):
        LegacyCurriculum.model_validate({"curriculum_type": "depth"})
