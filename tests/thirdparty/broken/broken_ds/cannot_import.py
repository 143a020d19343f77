"""Fails when it is imported."""

import a_library_nobody_has
