"""``deepspeed.moe``."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

NAMES: Mapping[str, Rows] = {
    "deepspeed.moe.layer": {
        "MoE Experts TopKGate": "ds_moe",
        "MOELayer": missing("ds_moe.MoE holds the gate and the experts itself"),
    },
    "deepspeed.moe.experts": {"Experts": "ds_moe"},
    "deepspeed.moe.sharded_moe": {
        "TopKGate": "ds_moe",
        "MOELayer top1gating top2gating topkgating": missing("ds_moe.MoE and ds_moe.TopKGate"),
    },
    "deepspeed.moe.utils": {
        "has_moe_layers is_moe_param is_moe_param_group split_params_into_shared_and_expert_params "
        "configure_moe_param_groups": "ds_moe.utils",
        "split_params_into_different_moe_groups_for_optimizer": differs(
            "ds_moe.utils", "accepted and returned as groups; the engine tells experts apart by itself"
        ),
        "split_params_grads_into_shared_and_expert_params": missing("p.grad of the parameters of each kind"),
    },
    "deepspeed.moe.mappings": {"gather_tokens drop_tokens": missing("ds_moe.MoE with tensor parallelism is not built")},
}
