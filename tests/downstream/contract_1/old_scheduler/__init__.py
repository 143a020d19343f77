"""old-scheduler: a learning-rate schedule, by name; ``plugin.py`` is the declaration."""
