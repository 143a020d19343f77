"""Inference programs on CUDA: their translation into launches, and how a step runs."""
