"""The order of the tests: quick answers first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests, then slow ones, then those that train; otherwise in the usual order."""
    items.sort(key=lambda item: [bool(item.get_closest_marker(m)) for m in ("learning", "slow")])
