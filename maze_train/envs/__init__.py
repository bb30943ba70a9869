"""Environments: one, and many at once."""
