"""A simulator as a single Gymnasium environment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.core.errors import EnvError
from maze_train.core.step_end import TERMINATED, TRUNCATED
from maze_train.envs.config import EnvConfig
from maze_train.envs.types import Env, Reset
from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from maze_train.simulators.simulator import Simulator


class SimulatorEnv(Env):
    """Adapter from a simulator of one environment to a Gymnasium environment.

    Args:
        simulator: A simulator with `num_envs` = 1; closed together with the adapter.
        render_mode: `rgb_array` or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 (as in the base)

    def __init__(self, simulator: Simulator, render_mode: str | None = None) -> None:
        self.simulator = simulator
        self.render_mode = render_mode
        self.observation_space = simulator.observation_space
        self.action_space = simulator.action_space
        self._observation = FlatView(self.observation_space)
        self._action = FlatView(self.action_space)
        self._obs: object = None
        self._has_ended = False
        self._picture: object = None

    @property
    def env(self) -> Any:
        """The object whose methods callbacks may call."""
        return self.simulator.called

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode. If `seed` is None, the seed is derived from the previous one."""
        super().reset(seed=seed)
        self._has_ended = False
        self._obs = self._first(self.simulator.reset_arrays(int(self.np_random.integers(2**31))))
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment."""
        parts = {key: np.asarray(part)[None] for key, part in self._action.read(action)}
        found = self.simulator.step_arrays(parts)
        end, info = int(found.end[0]), dict[str, Any]()
        self._has_ended = end in (TERMINATED, TRUNCATED)
        if not self._has_ended:
            self._obs = self._first(found.obs)
        else:
            info = {key: x[0] for key, x in found.columns.items()}
            if found.final_obs is not None:
                self._obs = self._first(found.final_obs)
        return self._obs, float(found.rewards[0]), end == TERMINATED, end == TRUNCATED, info

    def _first(self, obs: Any) -> object:
        """Return the observation of the environment, in the structure of the space."""
        return self._observation.build({key: leaf[0] for key, leaf in obs.items()})

    def render(self) -> Any:
        """Render the environment.

        At the end of an episode, the simulator has already begun the next one, so the previous
        image is returned.

        Raises:
            EnvError: If rendering is not supported.
        """
        if not self._has_ended or self._picture is None:
            self._picture = self.simulator.render()
        if self._picture is None:
            raise EnvError(
                f"{self.simulator.name} cannot be rendered: expected a method render() that "
                "returns an image, uint8 [height, width, 3]; disable video and rendering"
            )
        return self._picture

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()


def make_simulator_env(config: EnvConfig) -> SimulatorEnv:
    """Build a single environment from a simulator."""
    settings = dict(config.kwargs)
    mode = settings.pop("render_mode", None)
    return SimulatorEnv(simulator_of(replace(config, kwargs=settings), 1), mode)


def simulator_of(
    config: EnvConfig, num_envs: int, device: Any = "cpu", at_most: int | None = None
) -> Simulator:
    """Build the simulator selected by the settings.

    Args:
        config: Settings of the environment.
        num_envs: Number of environments.
        device: Device; ignored if the settings select a device.
        at_most: See `make_simulator`.
    """
    from maze_train.simulators.make import make_simulator  # Requires PyTorch.

    simulator = make_simulator(
        config.id,
        config.target,
        config.kwargs,
        num_envs,
        device=config.device or device,
        max_episode_steps=config.max_episode_steps,
        at_most=at_most,
    )
    simulator.truncation = config.truncation
    return simulator
