"""What the distributions of this repository are called.

`.ci/rename.py` changes the constants and every text that spells them out; tests/architecture holds
that they agree.
"""

CORE = "dscore-train"
PREFIX = "dscore-"


def dist_of(package: str) -> str:
    """The distribution that has the import package `package`, but for the core's own."""
    return PREFIX + package[3:].replace("_", "-")
