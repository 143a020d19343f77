"""Checkpoints of torch.distributed.checkpoint and of Megatron-core, read without unpickling them."""
