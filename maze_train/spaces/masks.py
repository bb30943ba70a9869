"""Legal actions as part of the observation: their layout, and whether there are any.

An environment whose legal actions depend on the state gives them in its Dict observation under the
top-level key `action_mask`, as numbers that are not 0 for legal actions:

- one array for a lone Discrete action space, [n], or MultiDiscrete one, [Σ n_k] with one choice
  after the other (also [*nvec.shape, n] when all n_k are equal to n);
- for Dict and Tuple action spaces either one array over all Discrete and MultiDiscrete parts, one
  after the other in the order of the flat action space, or a Dict or Tuple with one array for some
  of these parts, under the keys that they have in the action space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium import spaces

from maze_train.spaces.describe import flat_spaces, is_mask_key
from maze_train.spaces.mask_layouts import layout_of_masks

if TYPE_CHECKING:
    from maze_train.spaces.mask_layouts import MaskLayout


def mask_layout(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> MaskLayout | None:
    """Find the legal actions in the observations of an environment.

    Args:
        observation_space: Observation space of one environment, nested or flat.
        action_space: Its action space, nested or flat.

    Returns:
        The layout, or None when observations have no key `action_mask`.

    Raises:
        SpaceError: If the mask does not fit the action space.
    """
    if not isinstance(observation_space, spaces.Dict):
        return None
    masks = {k: leaf for k, leaf in flat_spaces(observation_space).items() if is_mask_key(k)}
    if not masks:
        return None
    layout: MaskLayout = layout_of_masks(masks, action_space)
    return layout
