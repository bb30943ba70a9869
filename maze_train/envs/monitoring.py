"""Layers of a wrapped environment, and what they declare: stacks of frames, returns of episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

import gymnasium

from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from collections.abc import Iterator


def layers_of(env: gymnasium.Env[Any, Any]) -> Iterator[Any]:
    """The wrappers of an environment from the outside in, then the environment itself."""
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        yield layer
        layer = layer.env
    yield layer


def continuing_layers(env: gymnasium.Env[Any, Any]) -> list[Any]:
    """The layers whose next reset may go on with the game that is running.

    They have the attribute `goes_on`: whether it will. Setting it to False makes it begin anew.
    """
    return [layer for layer in layers_of(env) if hasattr(layer, "goes_on")]


def gives_state(layer: Any) -> bool:
    """Whether a layer gives its state itself."""
    return all(callable(getattr(layer, name, None)) for name in ("state_dict", "load_state_dict"))


FRAME_STACK, MONITORED = "frame_stack", "monitored"
"""Keys of the metadata of an environment by which wrappers declare themselves."""


class MonitoringWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports the return and length of episodes, whatever wrappers around it make of them.

    The info of the last step of an episode gets `info["episode"] = {"r": return, "l": length}`;
    that of the reset does, when a wrapper outside ended the episode before. The metadata says
    `monitored`, whereupon statistics of training take these numbers alone.

    Args:
        env: The environment.
    """

    remembers: ClassVar = ("_return", "_length")

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.metadata = {**env.metadata, MONITORED: True}
        self._return = 0.0
        self._length = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin to count an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        if self._length:
            info = {**info, "episode": self.report()}
        return obs, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step and count."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        self._length += 1
        if terminated or truncated:
            info = {**info, "episode": self.report()}
        return obs, reward, terminated, truncated, info

    def report(self) -> dict[str, float]:
        """Return and length of the episode, which is over; begins to count anew."""
        report = {"r": self._return, "l": self._length}
        self._return, self._length = 0.0, 0
        return report


def described_metadata(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """The metadata of an environment, with `frame_stack` and `monitored` as they hold outside.

    A stack counts only where nothing around it changes observations: no
    `gymnasium.ObservationWrapper` lies outside, and the space of the leaf is still the same.
    """
    metadata = dict(env.metadata)
    declared = metadata.pop(FRAME_STACK, {})
    layer: Any = env
    changed = False
    while isinstance(layer, gymnasium.Wrapper) and (
        layer.env.metadata.get(FRAME_STACK) is env.metadata.get(FRAME_STACK)
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
