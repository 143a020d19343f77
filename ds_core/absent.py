"""What to say of a name that neither the engine nor its module has, in particular of one of DeepSpeed's engine.

Read only once somebody has asked for such a name.
"""

from __future__ import annotations

from typing import Any

__all__ = ["no_attribute"]

_ZERO = 'engine.config.section("zero_optimization")'
_PRECISION = "engine.ctx.precision says what weights, gradients and inputs are"

INSTEAD = {
    "allreduce_gradients": "engine.backward and engine.step reduce gradients by themselves",
    "basic_optimizer": "it is engine.optimizer",
    "bfloat16_enabled": _PRECISION,
    "client_lr_scheduler": "it is engine.lr_scheduler",
    "client_optimizer": "it is engine.optimizer",
    "cur_scale": "it is engine.loss_scale",
    "data_parallel_group": 'it is engine.ctx.mesh.group("dp")',
    "dp_world_size": 'it is engine.ctx.mesh.size("dp")',
    "dynamic_loss_scale": "engine.loss_scale is the scale now, engine.scaler (None without one) what changes it",
    "fp16_enabled": _PRECISION,
    "is_first_stage": "a ds_pipeline.PipelineModule has it",
    "is_last_stage": "a ds_pipeline.PipelineModule has it",
    "load_module_state_dict": "use engine.module.load_state_dict(state_dict)",
    "load_universal_checkpoint": "engine.load_checkpoint reads a checkpoint of any layout",
    "local_rank": 'use engine.device, or int(os.environ["LOCAL_RANK"])',
    "module_state_dict": "use engine.module.state_dict(); of stage 3 engine.save_16bit_model",
    "mp_world_size": 'it is engine.ctx.mesh.size("tp")',
    "mpu": "engine.ctx.mesh has the groups, by axis",
    "offload_states": "it needs zero_optimization stage 3",
    "optimizer_name": "it is engine.config.core.optimizer.type",
    "optimizer_params": "it is engine.config.core.optimizer.params",
    "reload_states": "it needs zero_optimization stage 3",
    "scheduler_name": "it is engine.config.core.scheduler.type",
    "scheduler_params": "it is engine.config.core.scheduler.params",
    "set_batch_fn": "a ds_pipeline.PipelineModule has it",
    "zero_optimization": f"it is {_ZERO}, None without ZeRO",
    "zero_optimization_stage": f"it is {_ZERO}.stage",
    "_zero3_consolidated_16bit_state_dict": "use engine.save_16bit_model, or engine.module.state_dict() inside "
    "ds_zero.GatheredParameters(engine.module)",
}
"""Names of DeepSpeed's engine -> what this one has instead."""


def no_attribute(engine: Any, name: str, error: AttributeError) -> AttributeError:
    """`error`, which the engine's module raised for `name`, or a better one: it may be a name of the engine's."""
    module = engine.module
    if hasattr(type(module), name) or str(error) != f"{type(module).__name__!r} object has no attribute {name!r}":
        return error  # a property of the model's that failed, or a model that has words of its own
    text = f"neither the engine nor its module, a {type(module).__name__}, has an attribute {name!r}"
    if (instead := INSTEAD.get(name)) is None and name in type(engine.config.core).model_fields:
        instead = f"it is engine.config.core.{name}"
    # With name and obj Python looks for similar names by itself, when the error is shown.
    return AttributeError(f"{text}: {instead}" if instead else text, name=name, obj=engine)
