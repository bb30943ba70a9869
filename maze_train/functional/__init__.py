"""Pure tensor functions of papers: no modules, no configuration, no environments.

Tensors are time-major, [T, B, ...]: T steps of B environments.
"""
