from __future__ import annotations

import pytest
import torch
from cases import sweep

from maze_train.core.checks import check_same_shape
from maze_train.core.errors import ShapeError


def test_message_names_both_tensors_and_both_shapes() -> None:
    """The first tensor is the reference, and the first tensor with another shape is named."""
    with pytest.raises(
        ShapeError, match=r"^values has shape \[5, 2\], expected \[5, 3\] like rewards$"
    ):
        check_same_shape(
            rewards=torch.zeros(5, 3), lambdas=torch.zeros(5, 3), values=torch.zeros(5, 2)
        )


@sweep("shapes", [((4,), (4, 1)), ((4, 1), (4,)), ((1,), ()), ((2, 3), (3, 2))])
def test_shapes_that_broadcast_or_transpose_are_refused(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    """Shapes must be equal, not only the number of elements; dtypes may differ."""
    left, right = map(torch.zeros, shapes)
    check_same_shape(left=left, same=left.bool())
    with pytest.raises(ShapeError):
        check_same_shape(left=left, right=right)
