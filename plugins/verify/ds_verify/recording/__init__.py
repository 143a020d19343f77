"""Recording a run's steps, and computing them again from the record."""
