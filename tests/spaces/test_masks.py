from __future__ import annotations

import pickle

import numpy as np
import pytest
from cases import sweep
from gymnasium import spaces

from maze_train.core.errors import SpaceError
from maze_train.spaces.describe import MASK_KEY, flat_space, is_mask_key
from maze_train.spaces.masks import MaskedPart, mask_layout

BOARD = spaces.Box(0, 1, (9,))
NESTED = spaces.Dict(
    {
        "arm": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
        "keys": spaces.MultiDiscrete([2, 4]),
        "wheel": spaces.Discrete(2),
    }
)


def bits(n):
    """Return the space of a mask with n entries."""
    return spaces.MultiBinary(n)


def observed(mask):
    """Return an observation space with this mask."""
    return spaces.Dict({"board": BOARD, MASK_KEY: mask})


def row(**leaves):
    """Return an observation with these masks."""
    masks = {key.replace("__", "/"): np.array(values) for key, values in leaves.items()}
    return {"board": np.zeros(9), **masks}


@pytest.mark.parametrize(
    "space", [BOARD, spaces.Dict({"board": BOARD, "robot": spaces.Dict({MASK_KEY: bits(3)})})]
)
def test_space_without_mask_has_no_layout(space):
    """Without a mask key at the top level there is no layout."""
    keys = ["action_mask", "action_mask/x/0", "action_masks", "robot/action_mask", "", "mask"]
    assert [is_mask_key(key) for key in keys] == [True, True, False, False, False, False]
    assert mask_layout(space, spaces.Discrete(3)) is None


@pytest.mark.parametrize(
    ("mask", "action", "sizes"),
    [
        (bits(4), spaces.Discrete(4, start=2), (4,)),
        (bits(9), spaces.MultiDiscrete([4, 3, 2]), (4, 3, 2)),
        (bits(9), spaces.MultiDiscrete([3, 3, 3]), (3, 3, 3)),
        (bits((3, 3)), spaces.MultiDiscrete([3, 3, 3]), (3, 3, 3)),
        (bits((2, 2, 3)), spaces.MultiDiscrete([[3, 3], [3, 3]]), (3, 3, 3, 3)),
        (bits(10), spaces.MultiDiscrete([[3, 1], [4, 2]]), (3, 1, 4, 2)),
    ],
)
def test_single_actions_have_one_mask(mask, action, sizes):
    """A mask is one array, flat or, for choices of equal size, a table."""
    layout = mask_layout(observed(mask), action)
    assert layout.parts == (MaskedPart("", MASK_KEY, 0, sizes),)
    assert layout.leaves == (MASK_KEY,)


def test_component_masks_have_their_keys():
    """Each mask has the key of its component, in the order of the actions."""
    mask = spaces.Dict({"wheel": bits(2), "arm": spaces.Tuple([bits(3)])})
    for space in (observed(mask), flat_space(observed(mask))):
        layout = mask_layout(space, NESTED)
        assert layout == mask_layout(space, flat_space(NESTED))
        assert layout.parts == (
            MaskedPart("arm/0", "action_mask/arm/0", 0, (3,)),
            MaskedPart("wheel", "action_mask/wheel", 0, (2,)),
        )
        assert layout.leaves == ("action_mask/arm/0", "action_mask/wheel")
    tuples = spaces.Tuple([spaces.Box(-1, 1), spaces.MultiDiscrete([2, 2])])
    layout = mask_layout(observed(spaces.Dict({"1": bits((2, 2))})), tuples)
    assert layout.parts == (MaskedPart("1", "action_mask/1", 0, (2, 2)),)


BOXES = [spaces.Box(0, 1, (4,), dtype) for dtype in (np.int8, np.float32, np.bool_)]


@sweep("mask", [bits(4), *BOXES, spaces.MultiDiscrete([2, 2, 2, 2])])
def test_masks_accept_bits_values_and_pairs(mask):
    """Masks may be bits, values from 0 to 1 of any dtype, or pairs; nonzero values are legal."""
    layout = mask_layout(observed(mask), spaces.Discrete(4))
    values = np.zeros((2, 4), mask.dtype)
    values[0, 2] = 1
    assert layout.illegal_part({MASK_KEY: values[0]}) is None
    assert "no action is legal" in layout.illegal_part({MASK_KEY: values[1]})
    assert layout.first_illegal_row({MASK_KEY: values}) == 1


@pytest.mark.parametrize(
    ("mask", "action", "message"),
    [
        (bits(4), spaces.Box(-1, 1, (4,)), "has no Discrete or MultiDiscrete part"),
        (bits(4), spaces.Discrete(3), r"shape \(4,\), expected \(3,\).*Discrete\(3\)"),
        (bits((2, 3)), spaces.MultiDiscrete([2, 4]), r"shape \(2, 3\), expected \(6,\): one"),
        (bits((3, 2)), spaces.MultiDiscrete([3, 3]), r"expected \(6,\) or \(2, 3\): one"),
        (bits(9), NESTED, r"shape \(9,\), expected \(11,\).*'arm/0': Discrete\(3\), 'keys': "),
        (
            spaces.Dict({"x": bits(3)}),
            spaces.Discrete(3),
            r"'action_mask/x' names a part, but the action space Discrete\(3\) has none.*\(3,\)",
        ),
        (
            spaces.Dict({"arm": spaces.Tuple([bits(3), bits(2)])}),
            NESTED,
            r"'action_mask/arm/1' is for Box.*cannot be masked.*\(arm/0, keys, wheel\)",
        ),
        (
            spaces.Dict({"whel": bits(2)}),
            NESTED,
            "'action_mask/whel' does not match any part.*did you mean action_mask/wheel?",
        ),
        (spaces.Dict({"keys": bits(5)}), NESTED, r"'action_mask/keys' has the shape \(5,\).*\(6,"),
        (spaces.Box(-np.inf, 0, (3,)), spaces.Discrete(3), r"expected MultiBinary\(n\), Box\(0, 1"),
        (spaces.Box(0, 255, (3,), np.uint8), spaces.Discrete(3), "expected MultiBinary"),
        (spaces.MultiDiscrete([2, 3, 2]), spaces.Discrete(3), "expected MultiBinary"),
        (spaces.MultiDiscrete([2, 2], start=[1, 1]), spaces.Discrete(2), "expected MultiBinary"),
        (spaces.Discrete(2), spaces.Discrete(1), "expected MultiBinary"),
    ],
)
def test_invalid_masks_raise(mask, action, message):
    """The error contains the mask and what is expected."""
    with pytest.raises(SpaceError, match=message):
        mask_layout(observed(mask), action)
    both = spaces.Dict({MASK_KEY: bits(11), f"{MASK_KEY}/wheel": bits(2)})
    with pytest.raises(SpaceError, match=r"expected one mask 'action_mask' or one for each part"):
        mask_layout(both, NESTED)


def test_illegal_component_is_named():
    """The message contains component, choice and position in the mask."""
    lone = mask_layout(observed(bits(3)), spaces.Discrete(3))
    assert pickle.loads(pickle.dumps(lone)) == lone
    assert lone.illegal_part(row(action_mask=[0, 1, 0])) is None
    assert lone.illegal_part(row(action_mask=[0, 0, 0])) == (
        "no action is legal: entries 0 to 2 of the observation 'action_mask' are all 0, "
        "expected a nonzero value for each legal action"
    )
    joined = mask_layout(observed(bits(11)), NESTED)
    assert joined.illegal_part(row(action_mask=[1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1])) is None
    problem = joined.illegal_part(row(action_mask=[1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1]))
    assert problem.startswith("no action of choice 1 of part 'keys' is legal: entries 5 to 8")
    separate = mask_layout(
        observed(spaces.Dict({"wheel": bits(2), "arm": spaces.Tuple([bits(3)])})), NESTED
    )
    legal = row(action_mask__wheel=[0, 1], action_mask__arm__0=[1, 0, 0])
    assert separate.illegal_part(legal) is None
    problem = separate.illegal_part({**legal, "action_mask/wheel": np.zeros(2)})
    assert problem.startswith("no action of part 'wheel' is legal: entries 0 to 1 of the obs")
    assert "'action_mask/wheel'" in problem


def test_tables_are_read_in_row_major_order():
    """In a mask of shape [K, n], row k is the mask of choice k."""
    layout = mask_layout(observed(bits((2, 3))), spaces.MultiDiscrete([3, 3]))
    assert layout.illegal_part(row(action_mask=[[1, 0, 0], [0, 0, 1]])) is None
    problem = layout.illegal_part(row(action_mask=[[1, 1, 1], [0, 0, 0]]))
    assert problem.startswith("no action of choice 1 is legal: entries 3 to 5")
    batch = np.ones((4, 2, 3), np.int8)
    batch[2, 0] = 0
    assert layout.first_illegal_row({MASK_KEY: batch}) == 2


def test_vectorized_mask_check_matches_single_rows():
    """The vectorized check finds the first row that the single-row check finds."""
    rng = np.random.default_rng(0)
    mask = spaces.Dict({"wheel": bits(2), "keys": bits(6)})
    layout = mask_layout(observed(mask), NESTED)
    seen = set()
    for _ in range(300):
        n = int(rng.integers(1, 5))
        obs = {
            "action_mask/wheel": rng.random((n, 2)) < 0.8,
            "action_mask/keys": rng.random((n, 6)) < 0.8,
        }
        rows = [{key: values[i] for key, values in obs.items()} for i in range(n)]
        bad = [i for i, one in enumerate(rows) if layout.illegal_part(one) is not None]
        assert layout.first_illegal_row(obs) == (bad[0] if bad else None)
        seen.add(layout.first_illegal_row(obs))
    assert seen >= {None, 0, 1, 2}
    assert layout.first_illegal_row({key: values[:0] for key, values in obs.items()}) is None
