"""Attention over sequences that are divided."""
