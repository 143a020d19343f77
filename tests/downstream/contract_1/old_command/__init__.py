"""old-command: a command of dscore; ``plugin.py`` is the declaration."""
