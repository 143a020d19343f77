"""Lets this process, and with it the workers of `run_ranks`, import `papers`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
