"""Helpers that reduce the number of test cases: sweeps, and cases for `make test-all` only."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gymnasium import spaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def sweep(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with each of some values as a single case, unlike `pytest.mark.parametrize`.

    Use it for products of values with the same code path. The test must not use fixtures with
    state.
    """
    all_values = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_all(**others: Any) -> None:
            for value in all_values:
                try:
                    test(**others, **{name: value})
                except Exception as error:
                    raise AssertionError(f"with {name} = {value!r}") from error

        signature = inspect.signature(test)
        others = [param for param in signature.parameters.values() if param.name != name]
        run_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_all

    return decorate


def everyday(count: int, values: Iterable[Any], *, are_rows: bool = False) -> list[Any]:
    """Mark all but the first values as `exhaustive`, so that `make test` skips them.

    Args:
        count: Number of values that `make test` runs.
        values: Values of one parameter, or rows for several parameters.
        are_rows: Whether each value is a row with one entry per parameter.
    """
    found = list(values)
    rest = found[count:] if are_rows else [(value,) for value in found[count:]]
    return [*found[:count], *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in rest)]


def small_discrete(n: int, start: int) -> spaces.Discrete:
    """Return a Discrete space of dtype uint8; int64 if Gymnasium (< 1.3) has no other."""
    if "dtype" not in inspect.signature(spaces.Discrete.__init__).parameters:
        return spaces.Discrete(n, start=start)
    return spaces.Discrete(n, start=start, dtype=np.uint8)
