"""Suites for the parts of a training step: partitioners, optimizers, data, checkpoints."""
