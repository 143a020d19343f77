"""`InferenceEngine`: what it answers equals the module, on one rank and on several."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_inference import init_inference, layer_policies
from ds_inference.run import parallel
from ds_testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from inference_models import ids, make

from ds_core.errors import ConfigError, UsageError

TOKENS = 6


def off(kind: str, config: dict[str, Any], sizes: dict[str, Any]) -> tuple[float, bool]:
    """How far logits are from the module's, and whether greedy texts are equal."""
    truth = make(kind, **sizes)
    engine = init_inference(make(kind, **sizes), config)
    prompts = ids()
    with torch.no_grad():
        wanted = truth(input_ids=prompts).logits
    far = float((engine(input_ids=prompts).logits - wanted).abs().max() / wanted.abs().max())
    if kind == "bert":
        return far, True
    keys = {
        "do_sample": False,
        "max_new_tokens": TOKENS,
        "attention_mask": torch.ones_like(prompts),
    }
    same = bool(torch.equal(engine.generate(prompts, **keys), truth.generate(prompts, **keys)))
    engine.destroy()
    return far, same


@pytest.mark.fast_cases(
    "1-llama-sizes0-True",
    "2-llama-sizes1-False",
    "2-gpt2-sizes2-False",
    "2-mixtral-sizes3-False",
    "2-mixtral-sizes3-True",
    "2-bert-sizes4-True",
)
@pytest.mark.parametrize("inject", [False, True])
@pytest.mark.parametrize(("tp", "kind", "sizes"), [
    (1, "llama", {}),
    (2, "llama", {}),  # three heads of keys: two here, one there
    (2, "gpt2", {}),
    (2, "mixtral", {"intermediate_size": 32}),
    (2, "bert", {}),
    # fewer keys than ranks
    pytest.param(4, "llama", {"num_key_value_heads": 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_answers_as_the_module(tp: int, kind: str, sizes: dict[str, Any], inject: bool) -> None:
    config = {
        "dtype": "fp32",
        "tensor_parallel": {"tp_size": tp},
        "replace_with_kernel_inject": inject,
    }
    found = [off(kind, config, sizes)] if tp == 1 else run_ranks(tp, off, kind, config, sizes)
    for rank, (far, same) in enumerate(found):
        assert far < 1e-5, f"rank {rank}"
        assert same, f"rank {rank}"


def quantised(config: dict[str, Any]) -> tuple[float, list[str], list[list[int]]]:
    """How far logits are, what was quantised, and what is generated."""
    model = make(
        "llama",
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    prompts = ids()
    with torch.no_grad():
        wanted = model(input_ids=prompts).logits
    engine = init_inference(model, config, replace_with_kernel_inject=True)
    far = float((engine(input_ids=prompts).logits.float() - wanted).norm() / wanted.norm())
    names = [
        name for name, m in engine.module.named_modules() if type(m).__name__ == "QuantizedLinear"
    ]
    return far, names, engine.generate(prompts, do_sample=False, max_new_tokens=TOKENS).tolist()


@pytest.mark.parametrize(
    ("config", "most", "layers", "some"),
    [
        ({"dtype": torch.int8}, 0.05, 15, "lm_head"),
        ({"dtype": "int4"}, 0.4, 15, "q_proj"),
        ({"dtype": "int8", "quant": {"qkv": {"enabled": False}}}, 0.05, 9, "o_proj"),
        ({"dtype": "int8", "quant": {"enabled": False}}, 0.05, 0, ""),
        (
            {"dtype": "bf16", "quant": {"weight": {"post_init_quant": {"mlp": {"num_bits": 8}}}}},
            0.05,
            6,
            "up_proj",
        ),
    ],
)
def test_weights_in_fewer_bits(config: dict[str, Any], most: float, layers: int, some: str) -> None:
    far, names, _ = quantised(config)
    assert 0 < far < most
    assert len(names) == layers
    assert any(some in name for name in names) == bool(some)


def test_weights_in_fewer_bits_on_two_ranks() -> None:
    (far, names, tokens), other = run_ranks(
        2, quantised, {"dtype": "int8", "tensor_parallel": {"tp_size": 2}}
    )
    assert far < 0.05
    assert len(names) == 15
    assert tokens == other[2]


def test_weights_kept_elsewhere() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    far, same = off("llama", {"dtype": "fp32", "zero": zero}, {})
    assert far < 1e-5
    assert same


def policy(names: Any) -> float:
    """A model that nobody knows, by names of linears whose outputs are summed."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(8, 20)
            self.narrow = nn.Linear(20, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.narrow(self.wide(x).sin())  # type: ignore[no-any-return]

    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block())
    truth = [p.clone() for p in model.parameters()]
    x = torch.randn(3, 8)
    with torch.no_grad():
        wanted = model(x)
    engine = init_inference(model, dtype=torch.float32, mp_size=2, injection_policy={Block: names})
    assert sum(p.numel() for p in engine.module.parameters()) < sum(p.numel() for p in truth)
    return float((engine(x) - wanted).abs().max())


def test_injection_policy_names_the_layers_that_are_summed() -> None:
    assert max(run_ranks(2, policy, ("narrow",))) < 1e-6


def test_a_policy_stands_for_a_family_that_is_known() -> None:
    model = make("gpt2")
    kind = type(model.transformer.h[0])
    wanted = init_inference(make("gpt2"), dtype="fp32")(ids()).logits
    engine = init_inference(
        model, dtype="fp32", injection_policy={kind: layer_policies.HFGPT2LayerPolicy}
    )
    assert torch.equal(engine(ids()).logits, wanted)
    with pytest.raises(ConfigError, match="HFBertLayerPolicy is for BertLayer, not for GPT2Block"):
        init_inference(
            make("gpt2"), dtype="fp32", injection_policy={kind: layer_policies.HFBertLayerPolicy}
        )


def sampled() -> list[list[int]]:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    engine = init_inference(make("llama"), dtype="fp32", tensor_parallel={"tp_size": 2})
    torch.manual_seed(torch.distributed.get_rank())
    found: list[list[int]] = engine.generate(ids(), do_sample=True, max_new_tokens=TOKENS).tolist()
    return found


def test_ranks_sample_alike() -> None:
    one, other = run_ranks(2, sampled)
    assert one == other


def test_many_requests_share_the_steps() -> None:
    from ds_inference.generate.requests import Request, SamplingParams

    truth = make("llama")
    engine = init_inference(make("llama"), dtype="fp32", replace_with_kernel_inject=True)
    prompts = [ids(1, n)[0].tolist() for n in (3, 9, 5)]
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    found = {
        o.handle.request.id: o.handle.results[0]
        for o in engine.serve(Request(p, params, i) for i, p in enumerate(prompts))
    }
    for number, prompt in enumerate(prompts):
        keys = {
            "do_sample": False,
            "max_new_tokens": TOKENS,
            "min_new_tokens": TOKENS,
            "eos_token_id": -1,
        }
        whole = truth.generate(torch.tensor([prompt]), **keys)
        assert list(found[number].tokens) == whole[0, len(prompt) :].tolist()


def given_group() -> float:
    import torch.distributed as dist

    from ds_core import comm

    comm.init_distributed("gloo")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = make("llama")
    prompts = ids()
    with torch.no_grad():
        wanted = model(input_ids=prompts).logits
    engine = init_inference(
        model, dtype="fp32", tensor_parallel={"tp_size": 2, "tp_group": groups[dist.get_rank() % 2]}
    )
    return float((engine(input_ids=prompts).logits - wanted).abs().max())


@pytest.mark.slow
def test_a_group_of_the_users() -> None:
    assert max(run_ranks(4, given_group)) < 1e-4


def test_attributes_are_the_modules() -> None:
    model = make("llama")
    engine = init_inference(model, dtype="bf16")
    assert engine.config is model.config
    assert engine.generation_config is model.generation_config
    assert engine.module is model
    assert next(engine.parameters()).dtype == torch.bfloat16
    assert engine.can_generate()
    assert not engine.training
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018


def test_a_pipeline_of_transformers_runs_it() -> None:
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<end>": 1, "<pad>": 2, **{f"w{i}": i for i in range(3, 66)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<end>", pad_token="<pad>"
    )
    pipe = hf.pipeline("text-generation", model=make("llama"), tokenizer=tokenizer)
    keys = {"do_sample": False, "max_new_tokens": TOKENS}
    wanted = pipe("w5 w9 w11", **keys)
    pipe.model = init_inference(pipe.model, dtype="fp32", replace_with_kernel_inject=False)
    assert pipe("w5 w9 w11", **keys) == wanted


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("inject", [False, True])
def test_times_of_each_call(kind: str, inject: bool) -> None:
    engine = init_inference(make(kind), dtype="fp32", replace_with_kernel_inject=inject)
    assert (engine._made.runnable is not None) is inject
    with pytest.raises(UsageError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    engine.profile_model_time()  # is on already
    for _ in range(2):
        engine(input_ids=ids())
    engine(input_ids=ids(), output_hidden_states=True)  # the module answers
    times = engine.model_times()
    assert len(times) == 3
    assert min(times) > 0
    assert engine.model_times() == []
    engine.destroy()
    engine(input_ids=ids())
    with pytest.raises(UsageError, match="profile_model_time"):
        engine.model_times()


@pytest.mark.parametrize("inject", [False, True])
def test_times_of_each_step_of_a_generation(inject: bool) -> None:
    engine = init_inference(make("llama"), dtype="fp32", replace_with_kernel_inject=inject)
    engine.profile_model_time()
    keys = {
        "do_sample": False,
        "max_new_tokens": TOKENS,
        "min_new_tokens": TOKENS,
        "eos_token_id": -1,
    }
    engine.generate(ids(), attention_mask=torch.ones(2, 9, dtype=torch.long), **keys)
    assert len(engine.model_times()) == TOKENS  # the prompt brings the first token
    with pytest.raises(ValueError, match="input_ids"):
        engine(input_ids=ids() + 100) if inject else engine()
    engine(input_ids=ids())
    assert len(engine.model_times()) == 2  # a call that fails counts, and leaves the clock in order


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        (
            {"enable_cuda_graph": True, "tensor_parallel": {"tp_size": 2}},
            ConfigError,
            "not with zero, and with tp_size",
        ),
        ({"enable_cuda_graph": True}, ConfigError, "the model is on cpu"),
        (
            {"enable_cuda_graph": True, "replace_with_kernel_inject": True, "dtype": "fp32"},
            ConfigError,
            "what serves LlamaForCausalLM on cpu records no graphs",
        ),
        (
            {"tensor_parallel": {"tp_size": 2}},
            ConfigError,
            "tp 2 needs a multiple of 2 processes; there are 1",
        ),
        (
            {"tensor_parallel": {"tp_size": 2, "mpu": object()}},
            ConfigError,
            "get_model_parallel_group",
        ),
        ({"injection_policy": {"NoLayer": ("o",)}}, ConfigError, "the model has no NoLayer"),
        ({"injection_policy": {"LlamaMLP": ("o_proj",)}}, ConfigError, "LlamaMLP has no 'o_proj'"),
        ({"injection_policy": {"LlamaMLP": object}}, ConfigError, "give the names of linears"),
        ({"injection_policy_tuple": ("down_proj", "fc9")}, ConfigError, "the model has no 'fc9'"),
    ],
)
def test_errors(config: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        init_inference(make("llama"), config)


def test_steps_are_recorded_where_the_provider_can() -> None:
    class Recording:
        on = 0

        def capture(self) -> None:
            self.on += 1

    mine: Any = Recording()
    parallel.record(mine, "it")
    parallel.record(parallel.Embedded(mine, torch.nn.Embedding(2, 2)), "it")
    assert mine.on == 2


def test_too_long_an_input() -> None:
    engine = init_inference(make("llama"), dtype="fp32", max_out_tokens=8)
    with pytest.raises(UsageError, match="9 tokens is longer than max_out_tokens 8"):
        engine.generate(ids())


@pytest.mark.slow
def test_experts_on_two_ranks() -> None:
    config = {"dtype": "fp32", "moe": {"ep_size": 2}}
    for far, same in run_ranks(2, off, "mixtral", config, {"intermediate_size": 32}):
        assert far < 1e-5
        assert same
