"""Action distributions: families bound to an action space, as functions of their parameters."""
