"""``deepspeed.DeepSpeedConfig``: a checked config as one flat object, whose attributes can be
set."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ds_core.setup.compose import compose
from ds_deepspeed_compat.configs import config_models as models
from ds_deepspeed_compat.configs import section_defaults as defaults
from ds_deepspeed_compat.constants import DEEPSPEED_OPTIMIZERS
from ds_deepspeed_compat.engines.engine_getters import CONFIG_KEYS, read
from ds_deepspeed_compat.utils.enums import DtypeEnum
from ds_deepspeed_compat.utils.logs import logger


class DeepSpeedConfig:
    """A config, checked as a run's is: the errors are those of `ds_core.initialize`.

    config: a dict, the path of a file, or JSON in URL-safe base64; "auto" counts as left out. mpu,
    mesh_device: what tells the number of data-parallel ranks, by which the three batch sizes are
    solved. Nothing reads this object: setting an attribute changes no run.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        chosen = compose(config, fill_later=True)
        checked = chosen.config
        raw = copy.deepcopy(checked.raw)
        self._param_dict = raw
        self._shown = checked.redacted()
        started = dist.is_available() and dist.is_initialized()
        self.global_rank = dist.get_rank() if started else 0
        self.world_size = _data_parallel_size(
            raw, mpu, mesh_device, dist.get_world_size() if started else 1
        )

        batch = chosen.batch(self.world_size)
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.gas

        keys: Any = SimpleNamespace(config=checked)
        for key, (path, default) in CONFIG_KEYS.items():
            if path == key or not key.startswith("zero_"):  # those are in zero_config
                setattr(self, key, copy.deepcopy(read(keys, path, default)))
        self._sections(checked, raw)
        self._precision(checked)
        core = checked.core
        self.prescale_gradients = core.prescale_gradients
        self.gradient_allreduce_op = core.gradient_allreduce_op
        self.disable_allgather = core.disable_allgather
        name = core.optimizer.type if core.optimizer is not None else None
        self.optimizer_name = (
            name.lower() if name is not None and name.lower() in DEEPSPEED_OPTIMIZERS else name
        )
        tags = read(keys, "checkpoint.tag_validation", "Warn")
        self.checkpoint_tag_validation_enabled = tags != "Ignore"
        self.checkpoint_tag_validation_fail = tags == "Fail"

    def _sections(self, checked: Any, raw: Mapping[str, Any]) -> None:
        """One object or dict per section."""
        try:
            zero = models.model_named("DeepSpeedZeroConfig")
        except (
            ModuleNotFoundError
        ):  # dscore-zero is not installed: a config that needs it was refused
            self.zero_config = None
            self.zero_optimization_stage = 0
        else:
            self.zero_config = models.values_of(checked.section("zero_optimization"), zero)
            self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.activation_checkpointing_config = defaults.DeepSpeedActivationCheckpointingConfig(raw)
        self.flops_profiler_config = defaults.DeepSpeedFlopsProfilerConfig(raw)
        self.autotuning_config = defaults.DeepSpeedAutotuningConfig(raw)
        self.comms_config = defaults.DeepSpeedCommsConfig(raw)
        self.monitor_config = defaults.get_monitor_config(raw)
        self.timers_config = defaults.get_timers_config(raw)
        self.hybrid_engine = _section(
            "HybridEngineConfig", checked.section("hybrid_engine"), enabled=False
        )
        self.compile_config = _section(
            "CompileConfig", checked.section("compile"), deepcompile=False
        )
        self.aio_config = defaults.get_aio_config(raw)
        self.pipeline = {**PIPELINE, **(raw.get("pipeline") or {})}
        self.checkpoint_config = copy.deepcopy(raw.get("checkpoint") or {})
        self.data_efficiency_config = copy.deepcopy(raw.get("data_efficiency") or {})
        self.checkpoint_parallel_write_pipeline = bool(
            (self.checkpoint_config.get("parallel_write") or {}).get("pipeline_stage", False)
        )
        elastic = checked.section("elasticity")
        self.elasticity_enabled = elastic is not None and elastic.enabled
        if self.elasticity_enabled:
            self.elastic_model_parallel_size = elastic.model_parallel_size
            self.num_gpus_per_node = elastic.num_gpus_per_node
        # A config that says otherwise is refused.
        self.use_data_before_expert_parallel_ = False
        self.seq_parallel_communication_data_type = torch.float32

    def _precision(self, checked: Any) -> None:
        core = checked.core
        self.float16_config = models.values_of(core.fp16, models.DeepSpeedFP16Config)
        self.bfloat16_config = models.values_of(core.bf16, models.DeepSpeedBF16Config)
        self.loss_scale = self.float16_config.loss_scale
        self.initial_dynamic_scale = self.float16_config.initial_dynamic_scale()
        self.dynamic_loss_scale_args = self.float16_config.dynamic_loss_scale_args()
        travels = core.communication_data_type
        self.communication_data_type = (
            None if travels is None else DtypeEnum.from_str(travels).dtype
        )
        low = core.torch_autocast.dtype
        self.torch_autocast_dtype = None if low is None else DtypeEnum.from_str(low).dtype
        self.grad_accum_dtype = core.data_types.grad_accum_dtype
        self.param_dtype = core.data_types.param_dtype
        self.buffer_dtype = core.data_types.buffer_dtype

    def print_user_config(self) -> None:
        """Log the config as it was given, without secrets."""
        logger.info("  json = %s", json.dumps(self._shown, sort_keys=True, indent=4))

    def print(self, name: str) -> None:
        """Log every attribute under the heading `name`, and the config as it was given."""
        logger.info("%s:", name)
        for key in sorted(k for k in vars(self) if not k.startswith("_")):
            logger.info("  %s %s", f"{key} ".ljust(29, "."), getattr(self, key))
        self.print_user_config()


PIPELINE: Mapping[str, Any] = {
    "stages": "auto",
    "partition": "best",
    "seed_layers": False,
    "activation_checkpoint_interval": 0,
    "pipe_partitioned": True,
    "grad_partitioned": True,
}


def _data_parallel_size(raw: Mapping[str, Any], mpu: Any, mesh: Any, world: int) -> int:
    """The ranks that divide the batch."""
    if mpu is not None:
        return int(mpu.get_data_parallel_world_size())
    if mesh is not None:
        return int(dist.get_world_size(mesh.get_group(mesh_dim="data_parallel")))
    return world // int(raw.get("sequence_parallel_size") or 1)


def _section(name: str, parsed: Any, **switched_off: Any) -> Any:
    """A section as a model; without its package, which a config that has it needs, it is switched
    off.
    """
    try:
        return models.values_of(parsed, models.model_named(name))
    except ModuleNotFoundError:
        return SimpleNamespace(**switched_off)
