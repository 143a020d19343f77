"""old-mesh: a mesh over groups that the user has; ``plugin.py`` is the declaration."""
