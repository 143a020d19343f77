"""Kits for testing ds_core and its plugins: conformance suites to subclass, and a pool of worker
processes.

Everything is loaded on first use (PEP 562): pytest imports this package at start, when torch must
stay out.
"""

from ds_core import names_on_first_use

__getattr__, __dir__ = names_on_first_use(__name__)
