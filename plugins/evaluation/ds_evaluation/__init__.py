"""Metrics of a model over a data set, the same on any number of ranks: ``engine.evaluate``."""
