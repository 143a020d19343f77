"""Suites for what surrounds a run: commands, launchers, configs, monitors, whole plugins."""
