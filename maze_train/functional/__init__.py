"""Estimators and losses from papers as pure tensor functions.

Tensors are time-major, [T, B, ...]: T steps of B environments.
"""
