"""Checkpoints that DeepSpeed wrote."""
