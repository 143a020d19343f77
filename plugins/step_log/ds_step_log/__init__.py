"""ds-step-log: progress lines, phase timings and memory use, for the documented top-level keys; see README.md."""
