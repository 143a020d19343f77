"""Checkpoints of other programs: what a format gives and takes, and conversions between formats."""
