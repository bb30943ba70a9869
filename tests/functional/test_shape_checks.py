from __future__ import annotations

import pytest
import torch
from cases import sweep

from maze_train.core.checks import check_same_shape
from maze_train.core.errors import ShapeError


def test_shape_error_names_tensors_and_shapes() -> None:
    """The first tensor is the reference, and the first tensor with another shape is named."""
    with pytest.raises(
        ShapeError, match=r"^values has shape \[5, 2\], expected \[5, 3\] like rewards$"
    ):
        check_same_shape(
            rewards=torch.zeros(5, 3), lambdas=torch.zeros(5, 3), values=torch.zeros(5, 2)
        )


@sweep("shapes", [((4,), (4, 1)), ((4, 1), (4,)), ((1,), ()), ((2, 3), (3, 2))])
def test_check_same_shape_raises_for_broadcasting_shapes(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    """Shapes must be equal, not only the number of elements; dtypes may differ."""
    left, right = map(torch.zeros, shapes)
    check_same_shape(left=left, same=left.bool())
    with pytest.raises(ShapeError):
        check_same_shape(left=left, right=right)
