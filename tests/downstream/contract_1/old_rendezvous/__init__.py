"""old-rendezvous: how ranks find each other; ``plugin.py`` is the declaration."""
