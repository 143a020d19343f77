"""Suites for what a device does: accelerators, kernels, compile passes, stores, memory."""
