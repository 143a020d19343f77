"""Weights from files into a model, and in few bits."""
