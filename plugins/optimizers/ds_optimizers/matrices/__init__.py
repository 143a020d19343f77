"""Optimizers that keep states of whole matrices, each with the rank that transforms the matrix."""
