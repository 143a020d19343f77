"""old-config-format: a format of config files; ``plugin.py`` is the declaration."""
