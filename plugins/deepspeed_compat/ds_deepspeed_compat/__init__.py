"""Names that scripts written for DeepSpeed use, on ds_core: config structs, arguments, and an `mpu`."""
