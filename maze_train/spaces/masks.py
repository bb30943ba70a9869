"""Action masks in observations, and checks of actions.

If the legal actions of an environment depend on the state, its Dict observation contains a mask
under the top-level key `action_mask`. Entries of legal actions are nonzero. The mask is

- one array [n] for a Discrete action space;
- one array [Σ n_k] for a MultiDiscrete action space, with the sub-actions concatenated (or
  [*nvec.shape, n] if all n_k equal n);
- for a Dict or Tuple action space, either one array for all Discrete and MultiDiscrete components,
  concatenated in the order of the flat action space, or a Dict or Tuple with one array for each
  masked component, under the component's key in the action space.

A Discrete component is one sub-action, and every entry of a MultiDiscrete component is a
sub-action. Error messages call components parts, and sub-actions choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Space, spaces

from maze_train.core.errors import ShapeError, SpaceError, did_you_mean, nearest
from maze_train.spaces.agents import ACTS, AGENTS, AgentSpaces, agent_spaces
from maze_train.spaces.describe import MASK_KEY, FlatView, choice_sizes, flat_spaces, is_mask_key

if TYPE_CHECKING:
    from maze_train.core.types import Array


@dataclass(frozen=True)
class MaskedPart:
    """Masked component of the action space."""

    part: str
    """Key of the component in the flat action space; empty if the space is a single leaf."""
    leaf: str
    """Key of the mask in the flat observation."""
    start: int
    """First index of the component in the flattened mask."""
    sizes: tuple[int, ...]
    """Number of categories per sub-action, in row-major order."""

    @property
    def stop(self) -> int:
        """End index (exclusive) of the component in the flattened mask."""
        return self.start + sum(self.sizes)


@dataclass(frozen=True)
class MaskLayout:
    """Layout of the action masks of all components in the observation."""

    parts: tuple[MaskedPart, ...]
    """The masked components, in the order of the flat action space."""

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        """Keys of the masks in the flat observation."""
        return tuple(dict.fromkeys(part.leaf for part in self.parts))

    @cached_property
    def _starts(self) -> dict[str, Array]:
        """First index of each sub-action in each flattened mask."""
        sizes = {
            leaf: [n for part in self.parts if part.leaf == leaf for n in part.sizes]
            for leaf in self.leaves
        }
        return {leaf: np.cumsum([0, *own[:-1]], dtype=np.intp) for leaf, own in sizes.items()}

    def illegal_part(self, obs: Mapping[str, Array]) -> str | None:
        """Return a message about the first sub-action without a legal category, or None.

        Args:
            obs: Observation of one environment by leaf; only masks are read.

        Returns:
            The message, or None if every sub-action has a legal category.
        """
        for leaf, starts in self._starts.items():
            mask = obs[leaf]
            if len(starts) == 1:
                if np.count_nonzero(mask):
                    continue
            elif np.logical_or.reduceat(mask.reshape(-1), starts).all():
                continue
            return self._describe(leaf, mask)
        return None

    def first_illegal_row(self, obs: Mapping[str, Array]) -> int | None:
        """Return the first environment with a sub-action that has no legal category.

        Args:
            obs: Observations by leaf, [B, ...]; only masks are read.

        Returns:
            Index of the environment in [0, B), or None.
        """
        found: list[int] = []
        for leaf, starts in self._starts.items():
            shape = obs[leaf].shape
            rows = obs[leaf].reshape(shape[0], math.prod(shape[1:]))
            has_legal = np.logical_or.reduceat(rows, starts, axis=1).all(axis=1)
            if not has_legal.all():
                found.append(int(has_legal.argmin()))
        return min(found, default=None)

    def filled(self, obs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the masks; if a sub-action has no legal category, all its categories become legal.

        Args:
            obs: Observations by leaf, [B, ...]; only masks are read.

        Returns:
            The masks by leaf, [B, ...]; modified masks are copies.
        """
        found = {}
        for leaf, starts in self._starts.items():
            mask = obs[leaf]
            rows = mask.reshape(len(mask), -1)
            is_empty = ~np.logical_or.reduceat(rows, starts, axis=1)
            if is_empty.any():
                sizes = np.diff(starts, append=rows.shape[1])
                filled = np.where(np.repeat(is_empty, sizes, axis=1), 1, rows)
                mask = filled.astype(mask.dtype).reshape(mask.shape)
            found[leaf] = mask
        return found

    def _describe(self, leaf: str, mask: Array) -> str:
        """Return the message for the first sub-action in `mask` that has no legal category."""
        values = mask.reshape(-1)
        for part in self.parts:
            start = part.start
            for i, n in enumerate(part.sizes if part.leaf == leaf else ()):
                if not values[start : start + n].any():
                    choice = f" of choice {i}" if len(part.sizes) > 1 else ""
                    name = f" of part {part.part!r}" if part.part else ""
                    return (
                        f"no action{choice}{name} is legal: entries {start} to {start + n - 1} of "
                        f"the observation {leaf!r} are all 0, expected a nonzero value for each "
                        "legal action"
                    )
                start += n
        raise AssertionError(f"every choice of {leaf!r} has a legal action")


def _layout_of(masks: Mapping[str, Space[Any]], action_space: Space[Any]) -> MaskLayout:
    """Assign masks, by their keys in the flat observation, to components of the action space."""
    actions = flat_spaces(action_space)
    sizes = {key: choice_sizes(leaf) for key, leaf in actions.items()}
    maskable = {key: own for key, own in sizes.items() if own}
    if not maskable:
        raise SpaceError(
            f"the observation has the key {MASK_KEY!r}, but the action space {action_space} has no "
            "Discrete or MultiDiscrete part: rename the key if it is not a mask"
        )
    for leaf, space in masks.items():
        check_values(leaf, space)
    if MASK_KEY not in masks:
        return MaskLayout(tuple(separate_parts(masks, actions, maskable)))
    if len(masks) > 1:
        raise SpaceError(f"expected one mask {MASK_KEY!r} or one for each part, got {list(masks)}")
    parts = {key: actions[key] for key in maskable}
    check_shape(MASK_KEY, masks[MASK_KEY], list(maskable.values()), parts)
    return MaskLayout(tuple(joined_parts(maskable)))


def joined_parts(maskable: Mapping[str, tuple[int, ...]]) -> Iterator[MaskedPart]:
    """Yield all maskable components of the action space, which share one concatenated mask."""
    start = 0
    for key, sizes in maskable.items():
        yield MaskedPart(key, MASK_KEY, start, sizes)
        start += sum(sizes)


def separate_parts(
    masks: Mapping[str, Space[Any]],
    actions: Mapping[str, Space[Any]],
    maskable: Mapping[str, tuple[int, ...]],
) -> Iterator[MaskedPart]:
    """Yield the components of the action space that have a separate mask."""
    by_part = {leaf.removeprefix(f"{MASK_KEY}/"): leaf for leaf in masks}
    for key, leaf in by_part.items():
        if key in maskable:
            continue
        if "" in actions:
            raise SpaceError(
                f"the mask {leaf!r} names a part, but the action space {actions['']} has none: "
                f"expected one array {MASK_KEY!r} of shape ({sum(maskable[''])},)"
            )
        if key in actions:
            raise SpaceError(
                f"the mask {leaf!r} is for {actions[key]}, which cannot be masked: expected masks "
                f"of Discrete and MultiDiscrete parts only ({', '.join(maskable)})"
            )
        hint = did_you_mean(f"{MASK_KEY}/{part}" for part in nearest(key, maskable, count=1))
        raise SpaceError(
            f"the mask {leaf!r} does not match any part of the action space: expected one of "
            f"{', '.join(f'{MASK_KEY}/{part}' for part in maskable)}{hint}"
        )
    for key, sizes in maskable.items():
        if key in by_part:
            check_shape(by_part[key], masks[by_part[key]], [sizes], {key: actions[key]})
            yield MaskedPart(key, by_part[key], 0, sizes)


def check_values(leaf: str, space: Space[Any]) -> None:
    """Raise if the space of a mask allows values outside [0, 1]."""
    if isinstance(space, spaces.MultiBinary):
        return
    if isinstance(space, spaces.Box):
        fits = bool((space.low >= 0).all() and (space.high <= 1).all())
    elif isinstance(space, spaces.MultiDiscrete):
        fits = bool((space.nvec <= 2).all() and not space.start.any())
    else:
        fits = False
    if not fits:
        raise SpaceError(
            f"the mask {leaf!r} is {space}: expected MultiBinary(n), Box(0, 1, (n,), np.int8) or "
            "MultiDiscrete([2] * n), with 0 for illegal actions"
        )


def check_shape(
    leaf: str,
    space: Space[Any],
    sizes: list[tuple[int, ...]],
    actions: Mapping[str, Space[Any]],
) -> None:
    """Raise if a mask does not have one entry per action.

    Args:
        leaf: Key of the mask.
        space: Space of the mask.
        sizes: Numbers of categories of the sub-actions, for each component that the mask covers.
        actions: Action spaces of these components.
    """
    wanted: list[tuple[int, ...]] = [(sum(map(sum, sizes)),)]
    lone = next(iter(actions.values()))
    if len(actions) == 1 and isinstance(lone, spaces.MultiDiscrete) and len(set(sizes[0])) == 1:
        wanted.append((*lone.shape, sizes[0][0]))
    if space.shape not in wanted:
        of = ", ".join(f"{key!r}: {part}" if key else str(part) for key, part in actions.items())
        raise SpaceError(
            f"the mask {leaf!r} has the shape {space.shape}, expected "
            f"{' or '.join(map(str, wanted))}: one entry for each action of {of}"
        )


def mask_layout(observation_space: Space[Any], action_space: Space[Any]) -> MaskLayout | None:
    """Find the action masks in the observations of an environment.

    Args:
        observation_space: Observation space of one environment, nested or flat.
        action_space: Action space of the environment, nested or flat.

    Returns:
        The layout, or None if observations have no key `action_mask`.

    Raises:
        SpaceError: If the mask does not match the action space.
    """
    if not isinstance(observation_space, spaces.Dict):
        return None
    masks = {k: leaf for k, leaf in flat_spaces(observation_space).items() if is_mask_key(k)}
    return _layout_of(masks, action_space) if masks else None


def checked_actions(name: str, part: object, n: int, space: Space[Any]) -> Array:
    """Convert one component of n environment actions to an array `[n, *space.shape]`, with checks.

    Box values may lie outside the bounds, because `Distribution.to_env` clips actions.

    Args:
        name: Name of the component in messages.
        part: Values of the component.
        n: Number of actions.
        space: Leaf of the action space for the component.

    Raises:
        ShapeError: If the actions do not have the shape `[n, *space.shape]`.
        SpaceError: If the dtype does not match the space, or an action is invalid.
    """
    shape = (n, *(space.shape or ()))
    try:
        array = np.asarray(part)
    except ValueError as error:
        raise ShapeError(f"{name}: not an array of shape {shape}: {error}") from error
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
    """Return the smallest and the largest valid value of each entry."""
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + (space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + (space.nvec - 1)
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    limits = np.finfo(np.float64)
    return limits.min, limits.max


class LegalChoices:
    """Reads the action masks of the acting agents from observations.

    Args:
        observation_space: Observation space of one environment, single- or multi-agent (see
            `maze_train.spaces.agents`).
        action_space: Action space of the environment.

    Attributes:
        has_masks: Whether observations contain masks.

    Raises:
        SpaceError: If masks do not match the actions.
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

    def read(self, obs: object) -> Iterator[tuple[str, list[Array]]]:
        """Yield the key and the masks, one per sub-action, of every masked action component.

        Raises:
            SpaceError: If a sub-action has no legal category.
        """
        leaves = {key: np.asarray(leaf) for key, leaf in self._view.read(obs)}
        for number, layout in self._layouts:
            if number is None or leaves[ACTS][number]:
                yield from masks_of_parts(layout, leaves)


def layouts_of_agents(each: AgentSpaces) -> Iterator[tuple[int, MaskLayout]]:
    """Yield the index and the mask layout, with joint keys, of each agent with masks."""
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
    """Yield the key and the masks, one per sub-action, of every masked action component.

    Args:
        masks: Layout of the masks in the observation.
        leaves: One observation by leaf.

    Raises:
        SpaceError: If a sub-action has no legal category.
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
) -> object:
    """Sample a random legal action.

    Args:
        actions: The action space. Components without masks are sampled with its random generator.
        legal: Key and masks, one per sub-action, of each masked component.
        generator: Random generator to sample uniformly from the legal categories.
    """
    parts = dict(actions.read(actions.space.sample()))
    for key, masks in legal:
        leaf: Any = actions.leaves[key]
        drawn = [generator.choice(np.flatnonzero(mask)) for mask in masks]
        parts[key] = np.reshape(drawn, leaf.shape) + leaf.start
    return parts[""] if actions.is_single else actions.build(parts)
