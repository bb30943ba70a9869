"""Reduction of test cases: sweeps over values, and cases for `make test-all`."""

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
    """Run a test with each of some values, as `pytest.mark.parametrize` does, but as one case.

    It is for products of values that take the same way through the code. The test asks for no
    fixture that remembers something.
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
    """Mark all but the first values as `exhaustive`: `make test` leaves them out.

    Args:
        count: How many values are tried every day.
        values: Values of one parameter, or of several.
        are_rows: Whether each value is a row, with one entry for each of several parameters.
    """
    found = list(values)
    rest = found[count:] if are_rows else [(value,) for value in found[count:]]
    return [*found[:count], *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in rest)]


def small_discrete(n: int, start: int) -> spaces.Discrete:
    """A Discrete space of type uint8; int64 where gymnasium (< 1.3) has no other."""
    if "dtype" not in inspect.signature(spaces.Discrete.__init__).parameters:
        return spaces.Discrete(n, start=start)
    return spaces.Discrete(n, start=start, dtype=np.uint8)
