"""Names that scripts written for DeepSpeed use, on ds_core: today its config structs (`ds_deepspeed_compat.config`)."""
