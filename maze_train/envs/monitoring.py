"""Wrapper stacks: metadata, saved state, episode statistics, games with several episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import wrappers as known
from gymnasium.spaces import Box
from gymnasium.wrappers import TimeLimit

from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.state import plain_copy
from maze_train.envs.faults import checked_info
from maze_train.envs.types import Env, Reset, Space, Step, Wrapper
from maze_train.spaces.describe import MASK_KEY, FlatView, choice_sizes, flat_spaces
from maze_train.spaces.masks import mask_layout


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
