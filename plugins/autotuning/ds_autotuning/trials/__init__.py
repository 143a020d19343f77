"""One trial: its processes, what it measures, what it leaves."""
