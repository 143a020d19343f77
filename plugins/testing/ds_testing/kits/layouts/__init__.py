"""A model that is cut along axes of every kind, without a feature behind them, and runs of it."""
