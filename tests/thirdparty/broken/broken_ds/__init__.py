"""Broken on purpose."""
