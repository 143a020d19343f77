"""Gradients: from autograd to the shard of the rank that owns them."""
