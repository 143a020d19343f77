"""Metrics of a model over a dataset, the same on any number of ranks: ``engine.evaluate``."""
