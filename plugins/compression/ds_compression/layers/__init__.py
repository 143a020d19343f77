"""Layers that are divided or compressed."""
