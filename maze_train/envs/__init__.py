"""Single and vectorized environments."""
