"""Suites for what ranks do together: collectives, meshes, runners, divided layers."""
