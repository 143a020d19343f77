"""Conformance suites, by what they are about."""
