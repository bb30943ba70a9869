"""Adapter for tensor-based vector environments in the style of Gymnasium, Isaac Lab and rsl_rl."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium import spaces

from maze_train.core.errors import EnvError, ShapeError, SpaceError
from maze_train.core.step_end import TERMINATED, TRUNCATED, StepBatch
from maze_train.core.types import Tensor, TensorTree, leaves_by_key
from maze_train.simulators.simulator import Simulator, flat_leaves, offered
from maze_train.spaces.describe import FlatView

NEEDED = ("num_envs", "single_observation_space", "single_action_space", "reset", "step")
"""Required attributes of a tensor-based vector environment."""

STATE = ("state_dict", "load_state_dict")
OPTIONAL = (*STATE, "device", "render", "close")
"""Optional attributes."""

FINAL_OBS, FINAL_INFO = ("final_obs", "final_observation"), "final_info"
LOGS = ("log", "episode")
"""Info keys for final observations, final infos and nested mappings of metrics."""


class TensorSimulator(Simulator):
    """Adapter for a tensor-based vector environment with automatic reset.

    The environment has `reset() -> (obs, info)` and `step(actions) -> (obs, rewards, terminated,
    truncated, info)`, or the rsl_rl form `step(actions) -> (obs, rewards, dones, info)`. In both
    forms, `info["time_outs"]` marks truncated episodes, and `info["final_obs"]` holds the true
    final observations.

    Args:
        env: The vector environment with `num_envs`, `single_observation_space` and
            `single_action_space`. All tensors are on `env.device` (default: `cpu`). Running
            episodes can be saved if the environment has `state_dict` and `load_state_dict`.
        name: Name in messages.

    Raises:
        EnvError: If a required attribute is missing.
    """

    def __init__(self, env: Any, name: str) -> None:
        found = offered(env, (*NEEDED, *OPTIONAL))
        if missing := [key for key in NEEDED if key not in found]:
            raise EnvError(
                f"{name} has no {', '.join(missing)}: env.backend=tensor expects a vector "
                f"environment of tensors with {', '.join(NEEDED)} and device, or a functional one "
                "of JAX with reset(key) and step(state, action)"
            )
        self._env, self.name = env, name
        self.num_envs = int(env.num_envs)
        self.device = torch.device(found.get("device", "cpu"))
        self.observation_space = as_space(env.single_observation_space)
        self.action_space = as_space(env.single_action_space)
        self.has_lasting_state = self.can_be_restored = found.keys() >= set(STATE)
        self._render: Callable[[], Any] = found.get("render", lambda: None)
        self._close: Callable[[], Any] = found.get("close", lambda: None)
        self._observation = FlatView(self.observation_space)
        self._action = FlatView(self.action_space)
        self._takes_seed = "seed" in inspect.signature(env.reset).parameters

    @property
    def called(self) -> Any:
        """The vector environment."""
        return self._env

    def reset(self, seed: int) -> TensorTree:
        """Begin new episodes. If `env.reset` takes no seed, PyTorch is seeded instead."""
        if not self._takes_seed:
            torch.manual_seed(seed)
        result = self._env.reset(**({"seed": seed} if self._takes_seed else {}))
        obs = self._flat(result[0] if isinstance(result, tuple) else result)
        leaves = leaves_by_key(obs)
        for key, space in self._observation.leaves.items():
            where = f"the observation{f' {key!r}' if key else ''} of {self.name}"
            if not isinstance(leaves[key], torch.Tensor):
                problem = f"is {type(leaves[key]).__name__}: expected a tensor"
                raise SpaceError(f"{where} {problem}; for arrays use env.backend=native")
            shape = (self.num_envs, *(space.shape or ()))
            if leaves[key].shape != shape:
                found = list(leaves[key].shape)
                raise ShapeError(f"{where} has shape {found}, its space has {list(shape)}")
        return obs

    def _step(self, actions: TensorTree) -> StepBatch[Tensor]:
        """Step every environment once."""
        nested = actions if self._action.is_single else self._action.build(actions)  # type: ignore[arg-type]  # a mapping
        obs, rewards, *ends, info = self._env.step(nested)
        terminated = ends[0].bool()
        if len(ends) > 1:
            end = ends[1].bool().view(torch.uint8) * TRUNCATED
            end.masked_fill_(terminated, TERMINATED)
        else:
            end = terminated.view(torch.uint8) * TERMINATED
        # Time-outs take precedence, because rsl_rl environments also report them as `dones`.
        if (time_outs := info.get("time_outs")) is not None:
            end.masked_fill_(time_outs.bool(), TRUNCATED)
        final = next((info[key] for key in FINAL_OBS if info.get(key) is not None), None)
        return StepBatch(
            obs=self._flat(obs),
            rewards=rewards,
            end=end,
            final_obs=None if final is None else self._flat(final),
            columns=self._numbers(info),
        )

    def _flat(self, obs: object) -> TensorTree:
        return flat_leaves(self._observation, obs)

    def _numbers(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the scalars of an info and its nested mappings; `final_info` takes precedence."""
        found = {key: value for key, value in info.items() if key not in (*FINAL_OBS, FINAL_INFO)}
        for log in LOGS:
            if isinstance(found.get(log), dict):
                found |= found.pop(log)
        numbers = {}
        for key, value in found.items():
            if isinstance(value, (int, float)):
                value = torch.tensor(float(value))
            if isinstance(value, torch.Tensor) and value.shape in ((), (self.num_envs,)):
                numbers[key] = value
        last = info.get(FINAL_INFO)
        return numbers | self._numbers(last) if isinstance(last, Mapping) else numbers

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environment."""
        return {"env": self._env.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the environment."""
        self._env.load_state_dict(state["env"])

    def render(self) -> Any:
        """Return the image rendered by the environment; None if not supported."""
        return self._render()

    def close(self) -> None:
        """Close the environment if it has a method `close`."""
        self._close()


def as_space(space: object) -> spaces.Space[Any]:
    """Check a Gymnasium space; convert a mapping of spaces to a Dict.

    Raises:
        SpaceError: If `space` is not a space.
    """
    if isinstance(space, dict):
        return spaces.Dict({key: as_space(part) for key, part in space.items()})
    if not isinstance(space, spaces.Space):
        raise SpaceError(f"{space!r} is not a gymnasium space")
    return space
