"""Wrappers of single environments that Gymnasium does not provide.

Select these wrappers, or wrappers of Gymnasium such as `gymnasium.wrappers.RepeatAction` and
`gymnasium.wrappers.ClipReward`, by `_target_` in `env.wrappers` or `env.training_wrappers`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium import wrappers as known
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TimeLimit

from maze_train.core.checks import check_at_least, check_positive
from maze_train.core.errors import ConfigError, EnvError, SpaceError
from maze_train.core.seeding import Seeds
from maze_train.core.state import plain_copy
from maze_train.envs.faults import checked_info
from maze_train.envs.types import Env, Reset, Space, Step, Wrapper
from maze_train.envs.vector import Array, column_writer
from maze_train.spaces.agents import AGENTS, agent_spaces
from maze_train.spaces.describe import (
    MASK_KEY,
    FlatView,
    choice_sizes,
    flat_spaces,
    is_mask_key,
    join_keys,
)
from maze_train.spaces.masks import LegalChoices, mask_layout, random_action


def layers_of(env: Env) -> Iterator[Any]:
    """Yield the wrappers of an environment from the outside in, then the environment itself."""
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        yield layer
        layer = layer.env
    yield layer


class ContinuingWrapper(Wrapper):
    """Base class of wrappers that end an episode in the middle of a game.

    Attributes:
        goes_on: Whether the next reset continues the running game; otherwise a new game begins.
        game_end: Termination flag and final info if the game ended during a reset that continued
            the game, otherwise None.
    """

    goes_on: bool = False
    game_end: tuple[bool, Any] | None = None


def continuing_layers(env: Env) -> list[ContinuingWrapper]:
    """Return the wrappers whose next reset may continue the running game."""
    return [layer for layer in layers_of(env) if isinstance(layer, ContinuingWrapper)]


def gives_state(layer: object) -> bool:
    """Whether a layer has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(layer, name, None)) for name in ("state_dict", "load_state_dict"))


# The state of an environment with `state_dict()` and `load_state_dict(state)` is saved, and its
# episodes are not replayed. Every wrapper must have both methods or be listed below.

STATELESS = (
    known.ClipAction,
    known.ClipReward,
    known.DtypeObservation,
    known.FilterObservation,
    known.FlattenObservation,
    known.GrayscaleObservation,
    known.OrderEnforcing,
    known.PassiveEnvChecker,
    known.RescaleAction,
    known.RescaleObservation,
    known.ReshapeObservation,
    known.ResizeObservation,
)
"""Gymnasium wrappers whose state is restored by a seeded reset."""

REMEMBERED: dict[type[Any], tuple[str, ...]] = {
    known.TimeLimit: ("_elapsed_steps",),
    **dict.fromkeys(STATELESS, ()),
}
"""State attributes of known wrappers; wrappers of maze_train declare them in `remembers`."""


def offers_own_state(env: Env) -> bool:
    """Whether the states of the environment and all its wrappers can be saved."""
    *around, inner = layers_of(env)
    return gives_state(inner) and all(
        gives_state(layer) or remembered_by(layer) is not None for layer in around
    )


def own_state(env: Env) -> dict[str, Any]:
    """Return the state of an environment and its wrappers as plain values and copied arrays.

    Raises:
        EnvError: If the state contains values of other types.
    """
    names, states = [], []
    for layer in layers_of(env):
        name = type(layer).__name__
        if gives_state(layer):
            state = layer.state_dict()
        else:
            state = {key: vars(layer)[key] for key in remembered_by(layer) or ()}
        names.append(name)
        states.append(plain_copy(state, f"{name}.state_dict()"))
    return {"layers": names, "states": states}


def load_own_state(env: Env, state: object) -> None:
    """Restore the state of an environment and its wrappers, from the inside out.

    Args:
        env: The environment, after a reset with the seed of the episode.
        state: Result of `own_state`.

    Raises:
        EnvError: If the state belongs to an environment with other wrappers.
    """
    layers = list(layers_of(env))
    names = [type(layer).__name__ for layer in layers]
    given = state.get("layers") if isinstance(state, dict) else None
    states = state.get("states") if isinstance(state, dict) else None
    if given != names or not isinstance(states, list) or len(states) != len(names):
        raise EnvError(
            f"the saved state has the layers {given}, but the environment has {names}: restore it "
            "with the same wrappers"
        )
    for layer, part in zip(reversed(layers), reversed(states), strict=True):
        if gives_state(layer):
            layer.load_state_dict(plain_copy(part, "state"))
            continue
        for key in remembered_by(layer) or ():
            restore_attribute(layer, key, part[key])


def restore_attribute(layer: object, name: str, value: object) -> None:
    """Set an attribute; arrays in a dict may be shared, so they are overwritten in place."""
    if not isinstance(value, dict):
        setattr(layer, name, value)
        return
    for key, array in vars(layer)[name].items():
        array[...] = value[key]


def remembered_by(layer: object) -> tuple[str, ...] | None:
    """Return the state attributes of a known wrapper; None for other wrappers."""
    # Only the exact class is looked up, because a subclass may have more state.
    found: tuple[str, ...] | None = vars(type(layer)).get("remembers")
    return REMEMBERED.get(type(layer)) if found is None else found


FRAME_STACK, MONITORED = "frame_stack", "monitored"
"""Metadata keys set by wrappers."""


class MonitoringWrapper(Wrapper):
    """Records raw returns and lengths of episodes, regardless of outer wrappers.

    The metadata key `monitored` marks environments whose training metrics are taken from `take`.

    Args:
        env: The environment.
    """

    remembers: ClassVar = ("_return", "_length")

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.metadata = {**metadata_of(env), MONITORED: True}
        self._return = 0.0
        self._length = 0
        self._ended: tuple[float, int] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """End the running episode, if any, and begin a new one."""
        self.end()
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, info

    def step(self, action: Any) -> Step:
        """Step the environment, and update the return and length of the episode."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        self._length += 1
        if terminated or truncated:
            self.end()
        return obs, reward, terminated, truncated, info

    def end(self) -> None:
        """Store the return and length of the running episode, if any."""
        if self._length:
            self._ended = self._return, self._length
            self._return, self._length = 0.0, 0

    def take(self) -> tuple[float, int] | None:
        """Return and clear the return and length of the last ended episode; None if none ended."""
        ended, self._ended = self._ended, None
        return ended


def monitor_of(env: Env) -> MonitoringWrapper | None:
    """Return the innermost `MonitoringWrapper`, if there is one."""
    found = [layer for layer in layers_of(env) if isinstance(layer, MonitoringWrapper)]
    return found[-1] if found else None


def continue_game(
    env: Env, continuing: Sequence[ContinuingWrapper]
) -> tuple[Any, tuple[bool, dict[str, Any]] | None]:
    """Continue a game after a wrapper ended an episode; outer step limits are not restarted.

    Args:
        env: The environment.
        continuing: The wrappers that continue the game.

    Returns:
        The current observation, and the termination flag and info if the game ended during these
        steps, otherwise None.
    """
    for game in continuing:
        game.game_end = None
    around = takewhile(lambda layer: not isinstance(layer, ContinuingWrapper), layers_of(env))
    limits = [layer for layer in around if isinstance(layer, TimeLimit)]
    elapsed = [layer._elapsed_steps for layer in limits]
    obs, info = env.reset()
    checked_info(info)
    for layer, steps in zip(limits, elapsed, strict=True):
        layer._elapsed_steps = steps
    ends = [game.game_end for game in continuing if game.game_end is not None]
    return obs, (ends[-1][0], checked_info(ends[-1][1])) if ends else None


def metadata_of(env: object) -> Mapping[str, Any]:
    """Return the metadata of an environment; empty if undefined."""
    return getattr(env, "metadata", None) or {}


def described_metadata(env: Env) -> dict[str, Any]:
    """Return the metadata of an environment, with valid `frame_stack` and `monitored`.

    Frame stacks are declared by wrappers of maze_train, and found if Gymnasium's
    `FrameStackObservation` stacks Boxes. A frame stack is valid if no outer
    `gymnasium.ObservationWrapper` exists and outer wrappers do not change the space of the leaf.
    """
    metadata = dict(metadata_of(env))
    declared = metadata.pop(FRAME_STACK, {})
    layer = env
    changed = False
    while isinstance(layer, gymnasium.Wrapper) and (
        metadata_of(layer.env).get(FRAME_STACK) is metadata_of(env).get(FRAME_STACK)
    ):
        if isinstance(layer, known.FrameStackObservation):
            leaves = FlatView(layer.observation_space).leaves
            boxes = {key: leaf.shape for key, leaf in leaves.items() if isinstance(leaf, Box)}
            declared = {key: shape[0] for key, shape in boxes.items()}
            break
        changed = changed or isinstance(layer, gymnasium.ObservationWrapper)
        layer = layer.env
    if declared and not changed:
        inside = FlatView(layer.observation_space).leaves
        outside = FlatView(env.observation_space).leaves
        metadata[FRAME_STACK] = {
            key: int(n)
            for key, n in declared.items()
            if key in inside and inside[key] == outside.get(key)
        }
    return metadata


class AllLegalWrapper(Wrapper):
    """Makes all actions of a component legal if none is legal in the mask (`env.empty_mask`).

    Raises:
        ConfigError: If observations have no mask.
    """

    remembers: ClassVar = ()

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        masks = mask_layout(env.observation_space, env.action_space)
        if masks is None:
            problem = f"single-agent observations have no {MASK_KEY}; remove this setting"
            raise ConfigError("env.empty_mask", problem, "all_legal")
        self._masks, self._view = masks, FlatView(env.observation_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._filled(obs), info

    def step(self, action: Any) -> Step:
        """Step the environment."""
        obs, *rest = self.env.step(action)
        return self._filled(obs), *rest

    def _filled(self, obs: object) -> Any:
        leaves = dict(self._view.read(obs))
        masks = {leaf: np.asarray(leaves[leaf])[None] for leaf in self._masks.leaves}
        found = {leaf: mask[0] for leaf, mask in self._masks.filled(masks).items()}
        return self._view.build({**leaves, **found})


def mask_size(action_space: Space) -> int:
    """Return the size of a mask over all maskable components of an action space."""
    return sum(sum(choice_sizes(leaf)) for leaf in flat_spaces(action_space).values())


def note_on_ignored_mask(
    infos: Mapping[str, Any],
    observation_space: Space,
    action_space: Space,
) -> str | None:
    """Return a note if infos contain legal actions that `ActionMaskWrapper` could use.

    Args:
        infos: Infos of a vector environment with masks.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
    """
    if mask_layout(observation_space, action_space) is not None:
        return None
    if not np.size(infos[MASK_KEY][0]) == mask_size(action_space) > 0:
        return None
    return (
        f"info[{MASK_KEY!r}] of the environment is not used: with env.wrappers="
        "'[{_target_: maze_train.ActionMaskWrapper}]' the policy chooses among legal actions only"
    )


RANDOM_RESET_ATTEMPTS = 100


class ActionMaskWrapper(Wrapper):
    """Adds the legal actions in `info["action_mask"]` to the observation.

    The mask is stored under the key `action_mask` (`maze_train.spaces.masks`) of a Dict
    observation. An observation that is not a Dict is stored under the key `observation`. The mask
    has one entry for each action of every Discrete and MultiDiscrete component, and may have any
    shape.

    Args:
        env: The environment. Infos must contain a mask after each reset and step, except the last
            step of an episode.

    Raises:
        SpaceError: If no action can be masked, or observations already have a mask.
        EnvError: In `reset` and `step`, if the mask is missing or has the wrong size.
    """

    remembers: ClassVar = ()

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._masks = MaskOfInfo(type(self).__name__, env.observation_space, env.action_space)
        self.observation_space = self._masks.space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._observe(obs, info, False), info

    def step(self, action: Any) -> Step:
        """Step the environment."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        has_ended = terminated or truncated
        return self._observe(obs, info, has_ended), reward, terminated, truncated, info

    def _observe(self, obs: object, info: Mapping[str, Any], has_ended: bool) -> dict[str, Any]:
        """Return the observation with the mask, which is optional in the final info."""
        if MASK_KEY not in info and not has_ended:
            raise EnvError(f"ActionMaskWrapper: info has no {MASK_KEY!r}, only {sorted(info)}")
        return self._masks.observe(obs, info)


class MaskOfInfo:
    """Adds the legal actions in an info to the observation.

    Args:
        name: Name in messages.
        observation_space: Observation space without the mask.
        action_space: Action space; at least one component must be Discrete or MultiDiscrete.

    Attributes:
        space: Observation space with the mask.

    Raises:
        SpaceError: If no action can be masked, or observations already have a mask.
    """

    def __init__(
        self,
        name: str,
        observation_space: Space,
        action_space: Space,
    ) -> None:
        self._name, self._actions = name, action_space
        self._is_dict = isinstance(observation_space, spaces.Dict)
        parts: dict[str, Space] = {"observation": observation_space}
        if isinstance(observation_space, spaces.Dict):
            parts = dict(observation_space.spaces)
        if MASK_KEY in parts:
            raise SpaceError(f"observations already have the key {MASK_KEY!r}: remove this wrapper")
        self._size = mask_size(action_space)
        if not self._size:
            problem = f"the action space {action_space} has no Discrete or MultiDiscrete part"
            raise SpaceError(f"{name}: {problem}: remove this wrapper")
        self.space = spaces.Dict(OrderedDict({**parts, MASK_KEY: spaces.MultiBinary(self._size)}))

    def observe(self, obs: Any, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the observation with the mask; if the info has no mask, all actions are legal.

        Raises:
            EnvError: If the mask has the wrong size.
        """
        mask: Array = np.ravel(info.get(MASK_KEY, np.ones(self._size, np.int8)))
        if mask.size != self._size:
            raise EnvError(
                f"{self._name}: info[{MASK_KEY!r}] has {mask.size} entries, expected "
                f"{self._size}: one for each action of {self._actions}"
            )
        parts = dict(obs) if self._is_dict else {"observation": obs}
        return {**parts, MASK_KEY: (mask != 0).astype(np.int8)}


class RewardScalingWrapper(gymnasium.RewardWrapper[Any, Any]):
    """Multiplies rewards by a constant.

    Args:
        env: The environment.
        scale: The factor, > 0.

    Raises:
        ConfigError: If the factor is out of range.
    """

    remembers: ClassVar = ()

    def __init__(self, env: Env, scale: float) -> None:
        super().__init__(env)
        check_positive("scale", scale)
        self.scale = scale

    def reward(self, reward: SupportsFloat) -> float:
        """Return the scaled reward."""
        return self.scale * float(reward)


class RandomResetWrapper(Wrapper):
    """Takes a random number of random actions after each reset, to decorrelate episodes.

    The seed of the reset determines the number and the actions; the generator of `env.action_space`
    is not used. Actions respect the mask in the observation (`maze_train.spaces.masks`), or the
    mask in the info for a Discrete action space. If the episode ends during these actions, the
    environment is reset with a derived seed and the number is drawn again. Time limits of inner
    wrappers also count these actions.

    Args:
        env: The environment.
        min_initial_steps: Minimum number of actions, >= 0.
        max_initial_steps: Maximum number of actions, >= `min_initial_steps`.

    Raises:
        ConfigError: If an argument is out of range.
        SpaceError: If a mask does not match the action space.
        EnvError: In `reset`, if episodes always end during the random actions, or no action is
            legal.
    """

    remembers: ClassVar = ()

    def __init__(self, env: Env, min_initial_steps: int, max_initial_steps: int) -> None:
        super().__init__(env)
        check_at_least("min_initial_steps", min_initial_steps, 0)
        check_at_least("max_initial_steps", max_initial_steps, min_initial_steps)
        self.min_initial_steps = min_initial_steps
        self.max_initial_steps = max_initial_steps
        self._actions = copy.deepcopy(env.action_space)
        self._action_view = FlatView(self._actions)
        self._masks = LegalChoices(env.observation_space, env.action_space)
        self._random, self._seeds = np.random.default_rng(), np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode and take random actions."""
        if seed is not None:
            # The wrapper uses separate random streams, because the environment uses the same seed.
            seeds = Seeds(seed)
            self._random = seeds.generator("number of initial steps")
            self._seeds = seeds.generator("further resets")
            self._actions.seed(seeds.integer("initial actions") % 2**31)
        obs, info = self.env.reset(seed=seed, options=options)
        for _ in range(RANDOM_RESET_ATTEMPTS):
            steps = int(self._random.integers(self.min_initial_steps, self.max_initial_steps + 1))
            for _ in range(steps):
                action = random_action(self._action_view, self._legal(obs, info), self._random)
                obs, _, terminated, truncated, info = self.env.step(action)
                if terminated or truncated:
                    break
            else:
                return obs, info
            # Always pass a seed: environments without a stored generator would not be reproducible.
            obs, info = self.env.reset(seed=int(self._seeds.integers(2**31)), options=options)
        raise EnvError(
            f"RandomResetWrapper: {RANDOM_RESET_ATTEMPTS} episodes in a row ended within the first "
            f"{self.min_initial_steps} to {self.max_initial_steps} actions: lower "
            "min_initial_steps"
        )

    def _legal(self, obs: object, info: Mapping[str, Any]) -> Iterator[tuple[str, list[Array]]]:
        """Yield each action leaf that has masks, with one mask per component."""
        if not self._masks.has_masks:
            if MASK_KEY in info and isinstance(self._actions, spaces.Discrete):
                yield "", [np.asarray(info[MASK_KEY])]
            return
        try:
            yield from self._masks.read(obs)
        except SpaceError as error:
            raise EnvError(str(error)) from error


class DiscretizeActionsWrapper(gymnasium.ActionWrapper[Any, Any, Any]):
    """Replaces bounded continuous actions by a few evenly spaced values per dimension.

    Index i of k selects `low + i / (k - 1) * (high - low)`, including the bounds. A Box with one
    element becomes Discrete, a larger Box becomes MultiDiscrete with one component per element.
    Parts of Dict and Tuple spaces are identified by key (nested keys joined by `/`).

    Args:
        env: The environment.
        num_bins: Number of values per dimension, >= 2: an integer for all Boxes, or a mapping by
            key. Boxes without an entry and all other parts are unchanged.

    Raises:
        ConfigError: If `num_bins` is out of range, a key is unknown, or a Box is unbounded.
    """

    remembers: ClassVar = ()

    def __init__(self, env: Env, num_bins: int | Mapping[str, int]) -> None:
        super().__init__(env)
        self._view = FlatView(env.action_space)
        bins = bins_by_key(self._view, num_bins)
        self._tables = {key: choices(key, self._view.leaves[key], n) for key, n in bins.items()}
        leaves = {
            key: discrete_space(leaf, bins[key]) if key in bins else leaf
            for key, leaf in self._view.leaves.items()
        }
        self.action_space = with_leaves(env.action_space, leaves)

    def action(self, action: Any) -> Any:
        """Convert a discrete action to the continuous action."""
        values = {
            key: self._value(key, part) if key in self._tables else part
            for key, part in self._view.read(action)
        }
        return self._view.build(values)

    def _value(self, key: str, choice: object) -> Array:
        table = self._tables[key]
        picked: Array = table[np.arange(len(table)), np.asarray(choice).reshape(-1)]
        return picked.reshape(self._view.leaves[key].shape or ())


class ObservationStackWrapper(Wrapper):
    """Stacks the last n observations along a new first dimension, newest last.

    A greyscale image `[84, 84]` becomes `[n, 84, 84]`, a colour image `[n, height, width, 3]`, a
    vector `[n, size]`. At the beginning of an episode, the stack is n copies of the first
    observation. The metadata declares `frame_stack` (n by key of the leaf), so that a rollout
    stores each observation only once.

    Args:
        env: The environment.
        n: Number of observations, >= 1.
        keys: Parts of a Dict or Tuple observation (nested keys joined by `/`); None selects every
            Box except action masks, for all agents.

    Raises:
        ConfigError: If n is out of range, or a part is unknown or not a Box.
    """

    remembers: ClassVar = ("_stacks",)

    def __init__(self, env: Env, n: int, keys: Sequence[str] | None = None) -> None:
        super().__init__(env)
        check_at_least("n", n, 1)
        self._view = FlatView(env.observation_space)
        leaves = dict(self._view.leaves)
        boxes = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, spaces.Box)}
        if keys is None:
            keys = _observed(env, list(boxes))
        if not keys or any(key not in boxes for key in keys):
            raise ConfigError("keys", f"expected keys of Boxes, such as {sorted(boxes)}", keys)
        self._stacks: dict[str, Array] = {}
        self._put: dict[str, Callable[[int, Any], None]] = {}
        for key in keys:
            leaves[key] = batch_space(boxes[key], n)
            self._stacks[key] = np.zeros((n, *boxes[key].shape), boxes[key].dtype)
            self._put[key] = column_writer(key, self._stacks[key])
        self.observation_space = with_leaves(env.observation_space, leaves)
        metadata = described_metadata(env)
        declared = {**metadata.get(FRAME_STACK, {}), **dict.fromkeys(keys, n)}
        self.metadata = {**metadata, FRAME_STACK: declared}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode, and fill the stack with its first observation."""
        obs, info = self.env.reset(seed=seed, options=options)
        stacked = self._observe(obs)
        for stack in self._stacks.values():
            stack[:-1] = stack[-1]
        return self._copy(stacked), info

    def step(self, action: Any) -> Step:
        """Step the environment; the newest observation replaces the oldest."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        for stack in self._stacks.values():
            stack[:-1] = stack[1:]
        return self._copy(self._observe(obs)), reward, terminated, truncated, info

    def _observe(self, obs: object) -> dict[str, Any]:
        """Write the newest observation into the stacks; return the leaves."""
        leaves = dict(self._view.read(obs))
        for key, put in self._put.items():
            put(-1, leaves[key])
        return leaves

    def _copy(self, leaves: dict[str, Any]) -> object:
        """Return the observation with copies of the stacks."""
        for key, stack in self._stacks.items():
            leaves[key] = stack.copy()
        return self._view.build(leaves)


def _observed(env: Env, keys: list[str]) -> list[str]:
    """Return the keys of the observation leaves of agents, except action masks."""
    several = agent_spaces(env.observation_space, env.action_space)
    own = {key: key for key in keys}
    if several is not None:
        places = [f"{AGENTS}/{agent}" for agent in several.observations]
        own = {
            key: key[len(place) + 1 :]
            for place in places
            for key in keys
            if key == place or key.startswith(f"{place}/")
        }
    return [key for key, name in own.items() if not is_mask_key(name)]


def with_leaves(space: Space, leaves: Mapping[str, Space], path: tuple[Any, ...] = ()) -> Space:
    """Return a space with the structure of `space` and new leaves, by flattened key."""
    if isinstance(space, spaces.Dict):
        parts = [
            (name, with_leaves(part, leaves, (*path, name))) for name, part in space.spaces.items()
        ]
        return spaces.Dict(OrderedDict(parts))
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(
            [with_leaves(part, leaves, (*path, i)) for i, part in enumerate(space.spaces)]
        )
    return leaves[join_keys(path)]


def bins_by_key(view: FlatView, num_bins: int | Mapping[str, int]) -> dict[str, int]:
    """Return the number of values per dimension for each Box to discretize."""
    boxes = [key for key, leaf in view.leaves.items() if isinstance(leaf, spaces.Box)]
    bins = dict.fromkeys(boxes, num_bins) if isinstance(num_bins, int) else dict(num_bins)
    unknown = sorted(set(bins) - set(boxes))
    if unknown or not bins:
        raise ConfigError(
            "num_bins", f"expected the Boxes {boxes} of {view.space} as keys", num_bins
        )
    for key, n in bins.items():
        check_at_least(f"num_bins[{key}]" if key else "num_bins", n, 2)
    return bins


def choices(key: str, box: Any, n: int) -> Array:
    """Return the n values of each dimension, [size of the Box, n]."""
    low, high = (np.asarray(bound, np.float64).reshape(-1, 1) for bound in (box.low, box.high))
    if not box.is_bounded():
        name = f"the action {key!r}" if key else "the action"
        raise ConfigError("num_bins", f"{name} is unbounded and cannot be discretized: {box}", n)
    table = low + np.linspace(0.0, 1.0, n) * (high - low)
    if box.dtype.kind != "f":
        table = np.rint(table)
    table[:, -1:] = high
    discretized: Array = table.astype(box.dtype)
    return discretized


def discrete_space(box: Any, n: int) -> Space:
    """Return the discrete space with n values per dimension of a Box."""
    size = int(np.prod(box.shape))
    return spaces.Discrete(n) if size == 1 else spaces.MultiDiscrete([n] * size)


class SelectEntriesWrapper(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Selects entries of vector observations, for example to hide velocities.

    Args:
        env: Environment with vector observations, a Box `[D]`.
        indices: Indices of the entries to keep, in [0, D), in this order.

    Raises:
        ConfigError: If an index is out of range, or no index is given.
        SpaceError: If observations are not vectors.
    """

    remembers: ClassVar = ()

    def __init__(self, env: Env, indices: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise SpaceError(
                f"SelectEntriesWrapper requires vector observations, got {space}: flatten them "
                "first (gymnasium.wrappers.FlattenObservation)"
            )
        size = space.shape[0]
        if not indices or not all(isinstance(i, int) and 0 <= i < size for i in indices):
            raise ConfigError("indices", f"expected integers from 0 to {size - 1}", list(indices))
        self._indices = np.array(indices)
        self.observation_space = gymnasium.spaces.Box(
            space.low[self._indices],
            space.high[self._indices],
            dtype=space.dtype,
        )

    def observation(self, observation: Any) -> Any:
        """Return the selected entries."""
        return np.asarray(observation)[self._indices]
