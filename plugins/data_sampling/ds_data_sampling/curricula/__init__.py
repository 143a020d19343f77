"""Difficulty that grows with the steps."""
