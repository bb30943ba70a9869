"""Metrics of a run: rows of numbers, and the writers that show and keep them."""
