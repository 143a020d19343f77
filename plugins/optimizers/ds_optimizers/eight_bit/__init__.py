"""Optimizers whose states have 8 bits per value, with a scale for each block of them."""
