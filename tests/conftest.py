"""The order of the tests: quick answers first; and one thread for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest


def pytest_configure() -> None:
    """One thread of PyTorch: tests are small, and threads wait long for busy cores."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests, then slow ones, then those that train; otherwise in the usual order."""
    items.sort(key=lambda item: [bool(item.get_closest_marker(m)) for m in ("learning", "slow")])
