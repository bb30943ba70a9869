"""Many environments that take and give tensors on one device, and adapters of arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from maze_train.core.errors import EnvError
from maze_train.core.step_end import has_ended, is_terminated, is_truncated
from maze_train.core.types import Array, Tensor, TensorTree, as_tree, leaves_by_key, tree_map
from maze_train.spaces.autoreset import AutoresetMode
from maze_train.spaces.describe import FlatView


@dataclass(frozen=True, slots=True)
class SimulatorStep:
    """Results of one step of B environments, on the device of the simulator."""

    obs: TensorTree
    """Observations to act on, `[B, ...]`: where an episode ended, the first one of the next."""

    rewards: Tensor
    """`[B]` floats."""

    end: Tensor
    """How the step ended, codes of `maze_train.core.step_end.StepEnd`, `[B]` uint8."""

    final_obs: TensorTree | None = None
    """True last observations where an episode ended, `[B, ...]` (other rows mean nothing); None:
    the simulator does not give them."""

    infos: dict[str, Tensor] = field(default_factory=dict)
    """Numbers by name: `[B]`, which count where an episode ended, or 0-d: a mean over all."""


class Simulator(ABC):
    """B environments that step together, take tensors and give tensors on one device.

    An episode that ends is followed by the next one in the same step. Observations and actions are
    one tensor, or one flat mapping of tensors (keys joined by `/`). Nothing waits for the device.

    Attributes:
        num_envs: B.
        device: Where all tensors lie.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        can_be_restored: Whether `state_dict` gives the running episodes.
        truncation: Target of the value at a time limit if the simulator does not give the last
            observation, see `EnvConfig.truncation`.
        has_lasting_state: Whether that state holds more than a reset begins anew.
        name: Name in messages.
    """

    num_envs: int
    device: torch.device
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    can_be_restored: bool = False
    truncation: Literal["bootstrap_previous", "as_termination"] = "bootstrap_previous"
    has_lasting_state: bool = False
    name: str = "the simulator"

    @abstractmethod
    def reset(self, seed: int) -> TensorTree:
        """Begin new episodes everywhere; returns the first observations, `[B, ...]`."""

    @abstractmethod
    def step(self, actions: TensorTree) -> SimulatorStep:
        """Step every environment once.

        Args:
            actions: As the action space says, `[B, ...]`.
        """

    def state_dict(self) -> dict[str, Any]:
        """The running episodes as arrays and tensors.

        Raises:
            EnvError: If the simulator does not give them: `can_be_restored` is false.
        """
        raise EnvError(f"{self.name} does not give the state of its episodes")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the episodes of `state`.

        Raises:
            EnvError: If the simulator cannot.
        """
        raise EnvError(f"{self.name} takes no state of episodes")

    def render(self) -> Any:
        """A picture `[height, width, 3]` of the first environment; None: it cannot be drawn."""
        return None

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Release what the simulator holds."""


def as_arrays(tree: TensorTree) -> Any:
    """Copies of tensors as arrays."""
    return tree_map(lambda x: x.cpu().numpy().copy(), tree)


class SimulatorVectorEnv(VectorEnv[Any, Any, Any]):
    """A simulator as a vector environment of gymnasium, for whatever is not a training loop.

    Evaluations, for example, play few episodes: one wait for the device in each step does not
    matter there.

    Args:
        simulator: The simulator; closed with this.
        max_episode_steps: Steps that an episode may have; None: any number.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 (as in the base class)

    def __init__(self, simulator: Simulator, max_episode_steps: int | None = None) -> None:
        self.simulator = simulator
        self.max_episode_steps = max_episode_steps
        self.num_envs = simulator.num_envs
        self.single_observation_space = simulator.observation_space
        self.single_action_space = simulator.action_space
        self.observation_space = batch_space(simulator.observation_space, self.num_envs)
        self.action_space = batch_space(simulator.action_space, self.num_envs)
        self.observation_view = FlatView(simulator.observation_space)
        self.action_view = FlatView(simulator.action_space)
        self._obs: Any = None
        self._steps = np.zeros(self.num_envs, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes."""
        self._steps[:] = 0
        self._obs = as_arrays(self.simulator.reset(seed or 0))
        return self.nested(self._obs), {}

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step every environment once.

        Raises:
            EnvError: If an episode has more steps than it may.
        """
        flat = {
            key: torch.from_numpy(np.ascontiguousarray(part)).to(self.simulator.device)
            for key, part in self.action_view.read(actions)
        }
        before = self._obs
        step = self.simulator.step(as_tree(flat, not self.action_view.is_single))
        self._obs = as_arrays(step.obs)
        end = step.end.cpu().numpy()
        ended, infos = has_ended(end), dict[str, Any]()
        self._steps = np.where(ended, 0, self._steps + 1)
        if self.max_episode_steps and self._steps.max() >= self.max_episode_steps:
            # Only the simulator can begin a new episode in one of its environments.
            raise EnvError(
                f"an episode of {self.simulator.name} did not end within the "
                f"{self.max_episode_steps} steps of evaluation.max_episode_steps: a simulator has "
                "to end episodes itself, for example after env.max_episode_steps; or set "
                "evaluation.n_episodes=0 evaluation.metric=train/episode_return_mean"
            )
        if ended.any():
            last = before if step.final_obs is None else as_arrays(step.final_obs)
            numbers = {key: x.cpu().expand(self.num_envs) for key, x in step.infos.items()}
            final_obs, final_info = rows_of(last, ended), rows_of(as_arrays(numbers), ended)
            for i in np.flatnonzero(ended):
                final_obs[i] = self.nested(final_obs[i])
            infos = {"final_obs": final_obs, "_final_obs": ended}
            infos |= {"final_info": final_info, "_final_info": ended}
        rewards = step.rewards.cpu().numpy()
        return self.nested(self._obs), rewards, is_terminated(end), is_truncated(end), infos

    def nested(self, obs: Any) -> Any:
        """Observations by leaf, in the form of the space."""
        return obs if self.observation_view.is_single else self.observation_view.build(obs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the simulator."""
        self.simulator.close()


def rows_of(tree: Any, which: Array) -> Array:
    """The rows of a tree that a mask names, one object each, as gymnasium has them."""
    rows = np.full(len(which), None, dtype=object)
    for i in np.flatnonzero(which):
        rows[i] = tree_map(itemgetter(i), tree)
    return rows


class SimulatorEnv(gymnasium.Env[Any, Any]):
    """A simulator of one environment as a single environment of gymnasium.

    Args:
        simulator: A simulator with `num_envs` 1; closed with this.
        render_mode: `rgb_array`, or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 (as in the base)

    def __init__(self, simulator: Simulator, render_mode: str | None = None) -> None:
        self.simulator = simulator
        self.render_mode = render_mode
        self.observation_space = simulator.observation_space
        self.action_space = simulator.action_space
        self._vector = SimulatorVectorEnv(simulator)
        self._has_ended = False
        self._picture: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; without a seed, one that follows from the last seed."""
        super().reset(seed=seed)
        self._has_ended = False
        obs, _ = self._vector.reset(seed=int(self.np_random.integers(2**31)))
        return self._first(obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment; an episode that ended waits for `reset`."""
        view = self._vector.action_view
        flat = {key: np.asarray(part)[None] for key, part in view.read(action)}
        obs, rewards, terminated, truncated, infos = self._vector.step(view.build(flat))
        last = infos["final_obs"][0] if "final_obs" in infos else None
        info = {} if last is None else infos["final_info"][0]
        row = self._first(obs) if last is None else last
        self._has_ended = last is not None
        return row, float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info

    def _first(self, obs: Any) -> Any:
        view = self._vector.observation_view
        return view.build({key: leaf[0] for key, leaf in view.read(obs)})

    def render(self) -> Any:
        """A picture of the environment; after the end of an episode, the one before.

        The simulator has begun the next episode then.

        Raises:
            EnvError: If it cannot be drawn.
        """
        if not self._has_ended or self._picture is None:
            self._picture = self.simulator.render()
        if self._picture is None:
            raise EnvError(
                f"{self.simulator.name} cannot be drawn: expected a method render() that returns "
                "a picture, uint8 [height, width, 3]; leave out video and render"
            )
        return self._picture

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()


def flat_leaves(view: FlatView, value: Any) -> TensorTree:
    """A value of a space as one tensor, or as one flat mapping of tensors."""
    leaves = leaves_by_key(value) if view.is_single else dict(view.read(value))
    return as_tree(leaves, not view.is_single)
