"""``deepspeed.moe``."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

NAMES: Mapping[str, Rows] = {
    "deepspeed.moe.layer": {
        "MoE": "ds_moe",
        "Experts TopKGate": differs("ds_moe", "MoE makes them; their own arguments are ds_moe's"),
        "MOELayer": missing("ds_moe.MoE holds the gate and the experts itself"),
    },
    "deepspeed.moe.experts": {
        "Experts": differs("ds_moe", "MoE makes them; their own arguments are ds_moe's")
    },
    "deepspeed.moe.sharded_moe": {
        "TopKGate": differs("ds_moe", "MoE makes it; its own arguments are ds_moe's"),
        "einsum gumbel_rsample multiplicative_jitter _AllToAll _capacity": "ds_moe.deepspeed_names",
        "top1gating top2gating topkgating": differs(
            "ds_moe.deepspeed_names",
            "dense tensors, for layers of a script's own; logits stay as they are",
        ),
        "MOELayer": missing("ds_moe.MoE holds the gate and the experts itself"),
    },
    "deepspeed.moe.utils": {
        "has_moe_layers is_moe_param is_moe_param_group split_params_into_shared_and_expert_params "
        "configure_moe_param_groups": "ds_moe.utils",
        "split_params_into_different_moe_groups_for_optimizer": differs(
            "ds_moe.utils",
            "accepted and returned as groups; the engine tells experts apart by itself",
        ),
        "split_params_grads_into_shared_and_expert_params": "ds_moe.utils",
    },
    "deepspeed.moe.mappings": {
        "gather_tokens drop_tokens": differs(
            "ds_moe.deepspeed_names", "over the tensor-parallel ranks of the newest engine"
        )
    },
}
