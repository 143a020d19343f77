"""How `initialize` puts a run together, from the config to an engine."""
