"""Schedules as data, and their proofs."""
