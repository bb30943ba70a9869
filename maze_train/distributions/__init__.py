"""Action distributions: families bound to one action space, as functions of their parameters."""
