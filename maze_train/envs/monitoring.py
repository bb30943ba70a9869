"""Layers of a wrapped environment: what they declare, count, and continue with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from maze_train.core.errors import ConfigError
from maze_train.envs.faults import checked_info
from maze_train.envs.types import Env, Reset, Space, Step, Wrapper
from maze_train.spaces.describe import MASK_KEY, FlatView, choice_sizes, flat_spaces
from maze_train.spaces.masks import mask_layout


def layers_of(env: Env) -> Iterator[Any]:
    """The wrappers of an environment from the outside in, then the environment itself."""
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        yield layer
        layer = layer.env
    yield layer


class ContinuingWrapper(Wrapper):
    """Base of wrappers that end an episode in the middle of a game.

    Attributes:
        goes_on: Whether the next reset continues with the running game; set it to False to begin a
            new game.
    """

    goes_on: bool = False


def continuing_layers(env: Env) -> list[ContinuingWrapper]:
    """Return the layers whose next reset may continue with the running game."""
    return [layer for layer in layers_of(env) if isinstance(layer, ContinuingWrapper)]


def gives_state(layer: Any) -> bool:
    """Whether a layer gives its state itself."""
    return all(callable(getattr(layer, name, None)) for name in ("state_dict", "load_state_dict"))


FRAME_STACK, MONITORED = "frame_stack", "monitored"
"""Keys of the metadata of an environment by which wrappers declare themselves."""


class MonitoringWrapper(Wrapper):
    """Counts the return and length of episodes, whatever wrappers around it make of them.

    The metadata says `monitored`: statistics of training then use only what `take` returns.

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
        """Begin to count an episode; a running one ends here."""
        self.end()
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, info

    def step(self, action: Any) -> Step:
        """Step and count."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        self._length += 1
        if terminated or truncated:
            self.end()
        return obs, reward, terminated, truncated, info

    def end(self) -> None:
        """End the running episode, if it has begun."""
        if self._length:
            self._ended = self._return, self._length
            self._return, self._length = 0.0, 0

    def take(self) -> tuple[float, int] | None:
        """Return (once) the return and length of the episode that ended last, else None."""
        ended, self._ended = self._ended, None
        return ended


def monitor_of(env: Env) -> MonitoringWrapper | None:
    """Return the monitor of raw rewards within the wrappers of training, if there is one."""
    found = [layer for layer in layers_of(env) if isinstance(layer, MonitoringWrapper)]
    return found[-1] if found else None


class WatchedGame(Wrapper):
    """Remembers how the game ended last that a layer around it continues with.

    Attributes:
        end: Whether it terminated (else it was truncated), and the last info; None: it continues.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.end: tuple[bool, dict[str, Any]] | None = None

    def step(self, action: Any) -> Any:
        """Step."""
        result = self.env.step(action)
        if result[2] or result[3]:
            self.end = bool(result[2]), checked_info(result[4])
        return result


def watched_game(continuing: Sequence[ContinuingWrapper]) -> WatchedGame | None:
    """Watch the game that the layers continue with; None without such layers."""
    if not continuing:
        return None
    continuing[-1].env = game = WatchedGame(continuing[-1].env)
    return game


def continue_game(
    env: Env, game: WatchedGame | None
) -> tuple[Any, tuple[bool, dict[str, Any]] | None]:
    """Continue with a game after a wrapper ended an episode; limits of steps around it count on.

    Returns:
        The observation to act on, and how the game ended if it did: continuing takes steps without
        the agent.
    """
    if game is not None:
        game.end = None
    around = takewhile(lambda layer: not isinstance(layer, ContinuingWrapper), layers_of(env))
    limits = [layer for layer in around if isinstance(layer, TimeLimit)]
    elapsed = [layer._elapsed_steps for layer in limits]
    obs, info = env.reset()
    checked_info(info)
    for layer, steps in zip(limits, elapsed, strict=True):
        layer._elapsed_steps = steps
    return obs, None if game is None else game.end


def metadata_of(env: Any) -> Mapping[str, Any]:
    """The metadata of an environment; empty if its class has none, or None."""
    return getattr(env, "metadata", None) or {}


def described_metadata(env: Env) -> dict[str, Any]:
    """The metadata of an environment, with `frame_stack` and `monitored` as they hold outside.

    A stack counts only where nothing around it changes observations: no
    `gymnasium.ObservationWrapper` lies outside, and the space of the leaf is still the same.
    """
    metadata = dict(metadata_of(env))
    declared = metadata.pop(FRAME_STACK, {})
    layer: Any = env
    changed = False
    while isinstance(layer, gymnasium.Wrapper) and (
        metadata_of(layer.env).get(FRAME_STACK) is metadata_of(env).get(FRAME_STACK)
    ):
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
    """Makes all actions of a choice legal if its mask rules out every one (`env.empty_mask`).

    Raises:
        ConfigError: If observations have no mask.
    """

    remembers: ClassVar = ()

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        masks = mask_layout(env.observation_space, env.action_space)
        if masks is None:
            problem = f"the observations of one agent have no {MASK_KEY}; leave it out"
            raise ConfigError("env.empty_mask", problem, "all_legal")
        self._masks, self._view = masks, FlatView(env.observation_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._filled(obs), info

    def step(self, action: Any) -> Step:
        """Step."""
        obs, *rest = self.env.step(action)
        return self._filled(obs), *rest

    def _filled(self, obs: Any) -> Any:
        leaves = dict(self._view.read(obs))
        masks = {leaf: np.asarray(leaves[leaf])[None] for leaf in self._masks.leaves}
        found = {leaf: mask[0] for leaf, mask in self._masks.filled(masks).items()}
        return self._view.build({**leaves, **found})


def mask_size(action_space: Space) -> int:
    """Entries of a mask over all parts of an action space that can be masked."""
    return sum(sum(choice_sizes(leaf)) for leaf in flat_spaces(action_space).values())


def note_on_ignored_mask(
    infos: Mapping[str, Any],
    observation_space: Space,
    action_space: Space,
) -> str | None:
    """A line for people where environments give legal actions that `ActionMaskWrapper` could use.

    Args:
        infos: Infos of vector environments, with masks.
        observation_space: Observation space of one of them.
        action_space: Its action space.
    """
    if mask_layout(observation_space, action_space) is not None:
        return None
    if not np.size(infos[MASK_KEY][0]) == mask_size(action_space) > 0:
        return None
    return (
        f"info[{MASK_KEY!r}] of the environment is not used: with env.wrappers="
        "'[{_target_: maze_train.ActionMaskWrapper}]' the policy chooses among legal actions only"
    )
