"""Finds the settings with which a training script runs fastest: section ``autotuning``, ``dscore
tune``.
"""
