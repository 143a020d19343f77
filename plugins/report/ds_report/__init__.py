"""dscore-report: the record of a run, and ``dscore report`` and ``dscore top``, which read it; see
README.md.
"""
