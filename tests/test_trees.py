from __future__ import annotations

import torch

from maze_train.core.types import tree_leaves, tree_map


def test_one_tensor_is_a_tree():
    """A tensor alone is mapped as it is, and is its only leaf."""
    x = torch.arange(3.0)
    assert torch.equal(tree_map(lambda t: 2 * t, x), 2 * x)
    assert tree_leaves(x)[0] is x


def test_a_mapping_keeps_its_keys_and_their_order():
    """Each tensor of a mapping is mapped; keys and their order stay; the mapping is a new one."""
    tree = {"b": torch.ones(2), "a": torch.zeros(3)}
    doubled = tree_map(lambda t: t + 1, tree)
    assert list(doubled) == ["b", "a"]
    assert doubled is not tree
    assert [leaf.tolist() for leaf in tree_leaves(doubled)] == [[2, 2], [1, 1, 1]]
    assert [leaf.tolist() for leaf in tree_leaves(tree)] == [[1, 1], [0, 0, 0]]
