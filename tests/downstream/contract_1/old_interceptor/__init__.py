"""old-interceptor: called around every collective; ``plugin.py`` is the declaration."""
