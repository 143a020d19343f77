"""The section ``expert_parallel``: keys, errors that say what to do, and presets that other
distributions bring.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from autoep_models import OWN_PATTERNS, PRESET, Own, hugging_face, ids, settings
from ds_moe.autoep import presets
from ds_moe.config import ExpertParallelConfig
from ds_testing import run_ranks

import ds_core
from ds_core.errors import ConfigError, DSError, PluginError
from ds_core.mesh import plan_mesh
from ds_core.setup.compose import compose


def test_defaults_are_those_of_the_documents() -> None:
    section = ExpertParallelConfig()
    assert section.model_dump() == {
        **dict.fromkeys(
            ("enabled", "disable_triton_grouped_mm", "validate_folding_routing"), False
        ),
        **dict.fromkeys(("autoep_size", "expert_tensor_parallel_size"), 1),
        **dict.fromkeys(
            ("score_func", "score_apply", "combine_impl", "routed_scaling_factor", "top_k"), "auto"
        ),
        **dict.fromkeys(
            ("preset_model", "moe_layer_pattern", "has_shared_experts", "route_norm"), None
        ),
        **dict.fromkeys(("router_pattern", "expert_pattern", "shared_experts_pattern"), None),
        **dict.fromkeys(
            ("shared_experts_gate_pattern", "expert_w1", "expert_w2", "expert_w3"), None
        ),
        **dict.fromkeys(
            ("num_experts_attr", "top_k_attr", "num_expert_groups", "num_limited_groups"), None
        ),
        "load_balance_coeff": None,
        "use_grouped_mm": True,
        "route_scale": 1.0,
    }
    assert section.reroutes == ()
    changed = {
        "score_func": "sigmoid",
        "top_k": 3,
        "route_norm": False,
        "routed_scaling_factor": 2.0,
    }
    assert set(ExpertParallelConfig(**changed).reroutes) == set(changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size.*2 is not possible.*use 1",
        ),
        ({"load_balance_coeff": 0.001}, "load_balance_coeff.*0.001 is not possible.*use null"),
        (
            {"preset_model": "mixtrel"},
            "unknown preset 'mixtrel'; did you mean 'mixtral'.*deepseek_v3, mixtral",
        ),
        ({"preset_model": "no_such:PRESET"}, "preset_model.*cannot load 'no_such:PRESET'"),
        (
            {"preset_model": "ds_moe.autoep.presets:GROUP"},
            "is a str, not a ds_moe.autoep.presets.Preset",
        ),
        ({"autoep_size": 0}, "autoep_size"),
        ({"moe_layer_pattern": "layers.("}, "is no regular expression"),
        ({"moe_layer_pattern": ""}, "is empty"),
        *(
            ({key: "a.b"}, f"{key}.*without dots")
            for key in ("router_pattern", "expert_w1", "top_k_attr")
        ),
        *(
            ({key: " "}, f"{key}.*give one name")
            for key in ("expert_pattern", "shared_experts_gate_pattern")
        ),
        ({"score_func": "tanh"}, "score_func: must be one of .*softmax.*sigmoid.*, not .tanh"),
        ({"score_apply": "both"}, "score_apply"),
        ({"combine_impl": "loop"}, "combine_impl"),
        ({"routed_scaling_factor": "much"}, "routed_scaling_factor"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor.*above 0, or 'auto'"),
        ({"top_k": -1}, "top_k.*above 0, or 'auto'"),
        ({"num_expert_groups": 4}, "num_expert_groups is set without num_limited_groups; set both"),
        ({"num_limited_groups": 4}, "num_limited_groups is set without num_expert_groups"),
        (
            {"num_expert_groups": 2, "num_limited_groups": 3},
            "num_limited_groups 3 is more than .* 2; use 1 to 2",
        ),
        (
            {"num_expert_groups": 0, "num_limited_groups": 0},
            "num_expert_groups: must be a whole number >= 1 or null, not 0",
        ),
        ({"validate_folding_routing": 1}, "validate_folding_routing"),
        ({"autoep": 2}, "autoep"),
    ],
)
def test_wrong_keys_are_refused_with_the_fix(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)expert_parallel.*{told}"):
        ds_core.initialize(model=torch.nn.Linear(1, 1), config=settings(1, 0, **keys))
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"top_k": 2, "top_k_attr": "k"}, "top_k 2 overrides top_k_attr 'k'"),
        ({"has_shared_experts": True}, "go together"),
        ({"shared_experts_pattern": "shared"}, "go together"),
        ({"shared_experts_pattern": "shared", "has_shared_experts": False}, "go together"),
    ],
)
def test_keys_that_do_not_go_together_are_warned_of(keys: dict[str, Any], told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        ExpertParallelConfig(**keys)


def test_the_switch_of_a_kernel_that_there_is_not_is_noted() -> None:
    (note,) = compose({"expert_parallel": {"disable_triton_grouped_mm": True}}).notes
    assert str(note).startswith("expert_parallel.disable_triton_grouped_mm: has no effect: ")


def refused(listed: bool, keys: dict[str, Any], how: dict[str, Any], named: bool = True) -> str:
    """What is said of a model of our own."""
    try:
        config = settings(1, 0, **({**OWN_PATTERNS, **keys} if named else keys))
        ds_core.initialize(model=Own(listed, **how), config=config)
    except DSError as error:
        return str(error)
    return "nothing"


def several(cases: list[tuple[bool, dict[str, Any], dict[str, Any], bool]]) -> list[str]:
    return [refused(*case) for case in cases]


MODEL_ERRORS: list[tuple[bool, dict[str, Any], dict[str, Any], bool, str]] = [
    (False, {}, {}, False, "there is no preset for model type 'own'; name one (deepseek_v2, "),
    (
        False,
        {"moe_layer_pattern": r"layers\.\d+"},
        {},
        True,
        r"no module matches 'layers\\.\\d+' and has children",
    ),
    (False, {"router_pattern": "gate"}, {}, True, "has children 'gate' and 'pool'"),
    (
        False,
        {"expert_w1": "up"},
        {},
        True,
        "no weight 'up'; name one of its parameters: opening, raising, lowering",
    ),
    (False, {"expert_w3": "up"}, {}, True, "expert_w3: stack.0.moe.pool: there is no weight 'up'"),
    (
        False,
        {"expert_w3": None},
        {},
        True,
        "w1 (8, 12, 16), parameter 'raising'; expert_w1 must be [experts, 2 * in",
    ),
    (
        False,
        {"num_experts_attr": "inner"},
        {},
        True,
        "8 experts, but inner of the model's config is 12",
    ),
    (
        False,
        {"num_experts_attr": "e"},
        {},
        True,
        "num_experts_attr: stack.0.moe.pool: the model's config has no 'e'",
    ),
    (False, {"top_k_attr": "k"}, {"top_k": 0}, True, "has no 'k'; set top_k or top_k_attr"),
    (
        False,
        {"shared_experts_pattern": "more"},
        {},
        True,
        "the block has no child 'more'; it has chooser, pool, comm",
    ),
    (
        True,
        {"has_shared_experts": False, "shared_experts_pattern": None},
        {},
        True,
        "would not use common; name",
    ),
    (
        False,
        {"num_expert_groups": 3, "num_limited_groups": 1},
        {},
        True,
        "3 does not divide 8 experts; use 1, 2, 4, 8",
    ),
    (
        False,
        {"num_expert_groups": 8, "num_limited_groups": 1},
        {},
        True,
        "2 experts per token of 1 that it may use",
    ),
    (
        True,
        {"expert_w2": "down"},
        {},
        True,
        "expert 0 has parameters lowering.weight, opening.weight, raising.weight",
    ),
    (
        False,
        {"has_shared_experts": False, "shared_experts_pattern": None},
        {},
        True,
        "would not use common; name",
    ),
    (
        False,
        {},
        {"hidden_act": "relu"},
        True,
        "on random tokens AutoEP gives other numbers than the model (they diff",
    ),
    (
        True,
        {"has_shared_experts": False},
        {},
        True,
        "is false, but the block has a child 'common'; leave the key out",
    ),
    (
        True,
        {},
        {"sigmoid": True},
        True,
        "say what the block does: expert_w1, expert_w2 and expert_w3, score_func, sc",
    ),
    (
        True,
        {"expert_w1": "raising", "expert_w3": "opening"},
        {},
        True,
        "moe_layer_pattern: stack.0.moe.pool: on rand",
    ),
    (
        False,
        {},
        {"hidden_act": "tanh"},
        True,
        "hidden_act of the model's config is tanh; use one of silu",
    ),
]


def test_models_that_do_not_fit_are_refused_with_the_fix() -> None:
    cases = [(listed, keys, how, named) for listed, keys, how, named, _ in MODEL_ERRORS]
    for (*case, told), said in zip(
        MODEL_ERRORS, run_ranks(1, several, [list(c) for c in cases])[0], strict=True
    ):
        assert told in said, f"{case}: {said}"


def sizes() -> list[str]:
    said = []
    for size, how_many in ((2, 7), (2, 1), (3, 9)):
        try:
            config = settings(size, 0, **{**OWN_PATTERNS, "num_experts_attr": "how_many"})
            ds_core.initialize(model=Own(False, how_many=how_many, each=1), config=config)
        except ValueError as error:
            said.append(str(error))
    return said


def test_sizes_that_do_not_divide_name_those_that_do() -> None:
    for prime, few, world in run_ranks(2, sizes):
        assert (
            "expert_parallel.autoep_size: 2 does not divide the 7 experts of stack.0.moe; use 1, 7"
            in prime
        )
        assert (
            "expert_parallel.autoep_size: 2 is more than the 1 experts of stack.0.moe; use 1" in few
        )
        assert "ep 3 must divide dp 2" in world and "use 1, 2" in world


def with_tensor_parallelism() -> str:
    config = settings(1, 0)
    config["plugins"]["load"].append("fake_axes=ds_testing.kits.parallel.fake_axes")
    try:
        ds_core.initialize(
            model=hugging_face("mixtral"), config=config | {"fake_axes": {"axes": {"tp": 2}}}
        )
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_tensor_parallelism_is_refused() -> None:
    for said in run_ranks(2, with_tensor_parallelism):
        assert (
            "expert_parallel.enabled: AutoEP cannot be combined with tensor parallelism (2 ranks); "
            in said
        )


def other_ways() -> list[str]:
    """What is said of weights that are not there, optimizers that need them whole, and an mpu."""

    def attempt(config: dict[str, Any], **arguments: Any) -> str:
        try:
            engine, *_ = ds_core.initialize(
                **{"model": hugging_face("mixtral"), "config": config, **arguments}
            )
        except DSError as error:
            return str(error)
        engine.destroy()
        return "nothing"

    models = [hugging_face("mixtral"), Own(listed=True)]
    for model in models:  # as parameters are between uses that were made under zero.Init
        for param in model.parameters():
            param.data = torch.empty(0, dtype=param.dtype)
    said = [
        attempt(settings(2, 3), model=models[0]),
        attempt(settings(2, 3, **OWN_PATTERNS), model=models[1]),
    ]
    muon = settings(2, 0) | {"optimizer": {"type": "torch.optim.Muon", "params": {"lr": 0.01}}}
    said.append(attempt(muon))
    # That of dscore-optimizers collects whole matrices from all ranks.
    muon["optimizer"] = {"type": "Muon", "params": {"lr": 0.01}}
    muon["plugins"]["load"].append("ds_optimizers.plugin")
    said.append(attempt(muon))
    module = ModuleType("own_units")  # makes a mesh of any unit
    vars(module)["ds_mesh"] = lambda rank, world_size: plan_mesh([], world_size, rank)
    sys.modules[module.__name__] = module
    config = settings(2, 0)
    config["plugins"]["load"].append(module.__name__)
    said.append(attempt(config, mpu=object()))
    alive, *_ = ds_core.initialize(model=hugging_face("mixtral"), config=settings(2, 0))
    said.append(attempt(settings(2, 0), model=copy.deepcopy(alive.module)))
    alive.destroy()
    return said


def test_what_cannot_be_divided_is_refused() -> None:
    for fused, listed, muon, collecting, mpu, again in run_ranks(2, other_ways):
        assert "experts.gate_up_proj has no elements here" in fused and "without zero.Init" in fused
        assert "stack.0.moe.pool.0.opening.weight has no elements here" in listed
        assert (
            "expert_parallel.autoep_size: 2 cuts the stacked weights of model.layers.0.mlp.experts"
            in muon
        )
        assert (
            "takes each of them as one matrix; use an optimizer that works element by element"
            in muon
        )
        assert collecting == "nothing"
        assert "expert_parallel.autoep_size: 2 needs a mesh axis of that size; leave out mpu" in mpu
        assert "has only this rank's share of experts" in again and "destroy that engine" in again


def jitter() -> str:
    try:
        ds_core.initialize(
            model=hugging_face("mixtral", router_jitter_noise=0.1), config=settings(1, 0, top_k=1)
        )
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_noise_that_would_be_lost_is_refused() -> None:
    assert (
        "jitter_noise 0.1" in run_ranks(1, jitter)[0]
        and "router_jitter_noise to 0" in run_ranks(1, jitter)[0]
    )


def copied() -> list[Any]:
    """What is said where the config routes otherwise on purpose; and a copy of the engine's
    model."""
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_moe").addHandler(handler)
    logging.getLogger("ds_moe").setLevel(logging.INFO)
    model = hugging_face("qwen3_moe")
    model.config.my_k = 1
    state = torch.get_rng_state()
    config = settings(2, 0, top_k_attr="my_k", route_norm=False)
    engine, *_ = ds_core.initialize(model=model, config=config)
    kept = torch.equal(state, torch.get_rng_state())
    logging.getLogger("ds_moe").removeHandler(handler)
    logging.getLogger("ds_moe").setLevel(logging.NOTSET)
    twin = copy.deepcopy(engine.module)
    batch = ids(0, 0)
    same = torch.equal(twin(input_ids=batch).logits, engine(input_ids=batch).logits)
    chosen = engine.module.model.layers[0].mlp._how
    engine.destroy()
    return [said, same, kept, chosen.top_k, chosen.normalise, model.training]


def test_routing_otherwise_on_purpose_is_told_and_models_can_be_copied() -> None:
    for rank, (said, same, kept, top_k, normalise, training) in enumerate(run_ranks(2, copied)):
        assert [same, kept, top_k, normalise, training] == [True, True, 1, False, True]
        if rank == 0:
            assert any(
                "gives other numbers than the model" in s
                and "as route_norm, top_k_attr may say" in s
                for s in said
            ), said
            assert any(
                s == "AutoEP: 2 MoE layers (qwen3_moe), 8 experts, 4 on each of 2 ranks"
                for s in said
            ), said


# -- presets ---------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``installed("my-dist", own="module:NAME")``: a distribution that offers presets, for us and
    for workers.
    """

    def install(dist: str, **offers: str) -> None:
        folder = tmp_path / f"{dist.replace('-', '_')}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {ref}\n" for name, ref in offers.items())
        (folder / "entry_points.txt").write_text(f"[{presets.GROUP}]\n{lines}")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_presets_of_plugins_are_found_and_clashes_name_both(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert presets.find("own") is None and presets.for_model_type(["own"]) is None
    installed("my-moe", own="autoep_models:PRESET", qwen3_moe="autoep_models:PRESET")
    assert presets.find("own") is PRESET and "own" in presets.names()
    assert presets.for_model_type(["own"]) is PRESET  # the clash is none of its business
    with pytest.raises(
        PluginError,
        match=r"'qwen3_moe' is offered by my-moe \(autoep_models:PRESET\) and dscore-moe",
    ):
        presets.find("qwen3_moe")
    monkeypatch.setenv("DS_PLUGINS_DISABLE_AUTOLOAD", "1")
    assert presets.find("own") is None and presets.find("autoep_models:PRESET") is PRESET


def test_two_presets_for_one_model_type_are_an_error(installed: Any) -> None:
    installed("my-moe", own="autoep_models:PRESET", other="autoep_models:PRESET")
    with pytest.raises(
        PluginError, match="'own' and 'own' are both for model type own|preset_model"
    ):
        presets.for_model_type(["own"])


def forward(preset: str | None, ep: int, listed: bool) -> float:
    plain = Own(listed)
    keys = {} if preset is None else {"preset_model": preset}
    engine, *_ = ds_core.initialize(model=Own(listed), config=settings(ep, 0, **keys))
    batch = ids(1, 0)
    off = engine(input_ids=batch, labels=batch).logits - plain(batch, batch).logits
    share = [
        m for m in engine.module.modules() if type(m).__name__ in ("FusedExperts", "ListedExperts")
    ]
    engine.destroy()
    assert len(share) == 2 and share[0].share.rows == 8 // ep
    return float(off.abs().max())


def test_a_preset_of_a_plugin_works(installed: Any) -> None:
    for off in run_ranks(2, forward, "autoep_models:PRESET", 2, True):
        assert off < 1e-12
    installed("my-moe", own="autoep_models:PRESET")
    for name in (None, "own"):
        for off in run_ranks(2, forward, name, 2, False):
            assert off < 1e-12
