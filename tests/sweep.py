"""Let one case of a test run through many values."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

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
