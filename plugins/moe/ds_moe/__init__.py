"""Mixture of experts for ds_core."""
