"""Compiled kernels of experts, and their references."""
