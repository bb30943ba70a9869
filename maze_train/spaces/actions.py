"""Actions from elsewhere, which are checked, and actions drawn at random, legal where masks say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete

from maze_train.core.errors import ShapeError, SpaceError
from maze_train.spaces.agents import ACTS, AGENTS, agent_spaces
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import mask_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy.typing as npt
    from gymnasium import Space

    from maze_train.spaces.agents import AgentSpaces
    from maze_train.spaces.masks import MaskLayout

    Array = npt.NDArray[Any]


def checked_actions(name: str, part: Any, n: int, space: Space[Any]) -> Array:
    """One part of n actions of the environment, as an array `[n, *space.shape]`.

    Numbers of a Box may lie outside of its bounds, where `Distribution.to_env` would clip them.

    Args:
        name: Name in messages.
        part: The part.
        n: Number of actions.
        space: Leaf of the action space that it belongs to.

    Raises:
        ShapeError: If it does not have one row per action, in the shape of the space.
        SpaceError: If it is of another kind, or holds something that is no action.
    """
    shape = (n, *(space.shape or ()))
    try:
        array = np.asarray(part)
    except ValueError as error:
        raise ShapeError(f"{name}: no array of shape {shape}: {error}") from error
    if array.shape != shape:
        raise ShapeError(f"{name}: actions of shape {array.shape}, expected {shape}")
    kinds = "fiub" if np.dtype(space.dtype).kind == "f" else "iub"
    if array.dtype.kind not in kinds:
        raise SpaceError(f"{name}: actions of dtype {array.dtype}, expected {space.dtype}")
    low, high = _limits(space)
    is_wrong = ~((array >= low) & (array <= high))
    if is_wrong.any():
        row = int(np.argwhere(is_wrong)[0, 0])
        raise SpaceError(f"{name}: {array[row]} for observation {row} is not in {space}")
    return array


def _limits(space: Space[Any]) -> tuple[Any, Any]:
    """Smallest and largest numbers of an action."""
    if isinstance(space, Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, MultiBinary):
        return 0, 1
    limits = np.finfo(np.float64)
    return limits.min, limits.max


class LegalChoices:
    """Reads from observations which actions are legal; with several agents, for those that act.

    Args:
        observation_space: Observation space of one environment, of one agent or of several
            (`maze_train.spaces.agents`).
        action_space: Its action space.

    Attributes:
        has_masks: Whether observations contain legal actions.

    Raises:
        SpaceError: If masks do not fit the actions.
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        self._view = FlatView(observation_space)
        each = agent_spaces(observation_space, action_space)
        self._layouts: list[tuple[int | None, MaskLayout]] = []
        if each is not None:
            self._layouts += layouts_of_agents(each)
        elif (found := mask_layout(observation_space, action_space)) is not None:
            self._layouts = [(None, found)]
        self.has_masks = bool(self._layouts)

    def read(self, obs: Any) -> Iterator[tuple[str, list[Array]]]:
        """Key and masks, one for each choice, of every masked part of the actions to be taken.

        Raises:
            SpaceError: If a choice has no legal action.
        """
        leaves = {key: np.asarray(leaf) for key, leaf in self._view.read(obs)}
        for number, layout in self._layouts:
            if number is None or leaves[ACTS][number]:
                yield from masks_of_parts(layout, leaves)


def layouts_of_agents(each: AgentSpaces) -> Iterator[tuple[int, MaskLayout]]:
    """Number and legal actions of each agent that has some, in the keys of joint spaces."""
    for number, agent in enumerate(each.agents):
        layout = mask_layout(*each.of(agent))
        if layout is not None:
            parts = [
                replace(
                    part,
                    part=f"{agent}/{part.part}" if part.part else agent,
                    leaf=f"{AGENTS}/{agent}/{part.leaf}",
                )
                for part in layout.parts
            ]
            yield number, replace(layout, parts=tuple(parts))


def masks_of_parts(
    masks: MaskLayout, leaves: Mapping[str, Array]
) -> Iterator[tuple[str, list[Array]]]:
    """Key and masks, one for each choice, of every masked part of the action space.

    Args:
        masks: Layout of the legal actions in the observation.
        leaves: One observation by leaf.

    Raises:
        SpaceError: If a choice has no legal action.
    """
    problem = masks.illegal_part(leaves)
    if problem is not None:
        raise SpaceError(problem)
    for part in masks.parts:
        entries = leaves[part.leaf].reshape(-1)[part.start : part.stop]
        yield part.part, np.split(entries, np.cumsum(part.sizes)[:-1])


def random_action(
    actions: FlatView,
    legal: Iterable[tuple[str, list[Array]]],
    generator: np.random.Generator,
) -> Any:
    """An action of `actions.space.sample()`, the masked parts of which are drawn again.

    Args:
        actions: The action space, whose own generator draws what has no masks.
        legal: Key and masks, one for each choice, of each part that has some.
        generator: Draws uniformly from the legal choices.
    """
    parts = dict(actions.read(actions.space.sample()))
    for key, masks in legal:
        leaf: Any = actions.leaves[key]
        drawn = [generator.choice(np.flatnonzero(mask)) for mask in masks]
        parts[key] = np.reshape(drawn, leaf.shape) + leaf.start
    return parts[""] if actions.is_single else actions.build(parts)
