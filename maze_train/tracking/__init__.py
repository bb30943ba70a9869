"""Metrics of a run, and writers that display and store metrics."""
