"""old-partitioner: how model states lie over ranks; ``plugin.py`` is the declaration."""
