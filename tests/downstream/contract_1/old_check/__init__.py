"""old-check: rules that span a config's sections; ``plugin.py`` is the declaration."""
