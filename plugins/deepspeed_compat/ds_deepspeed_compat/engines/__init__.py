"""``deepspeed.initialize``: engines, optimizers, loaders."""
