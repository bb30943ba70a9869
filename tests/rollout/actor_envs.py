"""What tests of actors share: environments that their processes can import, models, seeds."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze_train import SequentialVectorEnv
from maze_train.data.frames import FrameStacks
from maze_train.envs.wrappers import ObservationStackWrapper
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import MemoryConfig, ModelConfig
from maze_train.rollout.collector import RolloutCollector
from maze_train.seeding import Seeds
from maze_train.types import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maze_train.data.rollout import Rollout
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.nets.actor_critic import ActorCriticModel
    from maze_train.types import Tensor

T, E = 5, 2
"""Steps of a rollout, and environments of an actor."""

SEED_OF = Seeds(11).integer

INF_BOX = spaces.Box(-np.inf, np.inf, (3,), np.float64)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "box": INF_BOX,
    "dict": spaces.Dict({"a": INF_BOX, "b": spaces.Discrete(7)}),
    "image": spaces.Box(0, 255, (6, 5), np.uint8),
    "mask": spaces.Dict({"action_mask": spaces.MultiBinary(3), "a": INF_BOX}),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3, start=1),
    "box": spaces.Box(-0.5, 0.25, (2,), np.float32),
    "dict": spaces.Dict({"gear": spaces.Discrete(3), "force": spaces.Box(-1.0, 1.0, (2,))}),
}


class ActorEnv(gymnasium.Env[Any, Any]):
    """Episodes of 1 to 6 steps whose numbers follow from the seed and the actions.

    Args:
        obs: Key of `OBSERVATIONS`.
        actions: Key of `ACTIONS`.
    """

    def __init__(self, obs: str = "box", actions: str = "discrete") -> None:
        self.observation_space = OBSERVATIONS[obs]
        self.action_space = ACTIONS[actions]
        self.obs = obs
        self.steps = 0

    def observe(self) -> Any:
        """What the agent sees."""
        box = np.array([self.mark, self.t / 10, self.last])
        if self.obs == "dict":
            return {"a": box, "b": self.t}
        if self.obs == "image":
            return np.full((6, 5), int(100 * abs(self.mark) + 10 * self.t) % 256, np.uint8)
        if self.obs == "mask":
            mask = np.ones(3, np.int8)
            mask[(self.t + int(self.mark > 0)) % 3] = 0
            return {"action_mask": mask, "a": box}
        return box

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.t, self.last = 0, 0.0
        self.mark = float(self.np_random.standard_normal())
        self.length = int(self.np_random.integers(1, 7))
        self.truncates = bool(self.np_random.integers(2))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step; the action is in the reward and in the next observation."""
        parts = action.values() if isinstance(action, dict) else [action]
        self.t += 1
        self.steps += 1
        self.last = float(sum(np.sum(part) for part in parts))
        reward = self.mark + self.last + float(self.np_random.random())
        ended = self.t == self.length
        return self.observe(), reward, ended and not self.truncates, ended and self.truncates, {}


def is_first(marker: Path) -> bool:
    """Whether nobody else, in whatever process, asked that of this file before."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class FaultyEnv(ActorEnv):
    """Fails at its step `at`.

    Args:
        how: `raise`, `exit`, `hang` or `lost`; `nothing`: it does not.
        at: Which of its steps, all episodes taken together.
        marker: A file that says that one failed, so that no other does; None: all of them do.
    """

    def __init__(self, how: str, at: int, marker: Path | None = None) -> None:
        super().__init__()
        self.how, self.at, self.marker = how, at, marker

    def _is_due(self) -> bool:
        return self.marker is None or is_first(self.marker)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, or fail."""
        obs, reward, *rest = super().step(action)
        if self.steps == self.at and self.how != "nothing" and self._is_due():
            if self.how == "raise":
                raise RuntimeError("the wheel came off")
            if self.how == "exit":
                os._exit(7)
            if self.how == "hang":
                time.sleep(600.0)
            if self.how == "lost":
                return (obs, float("nan"), *rest)
        return (obs, reward, *rest)


class ExitsEnv(ActorEnv):
    """Calls `sys.exit(0)` in its second step, in the second process."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, or exit."""
        if self.steps == 1 and multiprocessing.current_process().name.endswith("-1"):
            sys.exit(0)
        return super().step(action)


class GatedEnv(ActorEnv):
    """Observes its number, in the order in which environments were built; waits at its gate.

    Args:
        folder: Where numbers are drawn, and where the file `open/{number}` opens a gate.
        gated: Numbers of those that have a gate.
    """

    def __init__(self, folder: Path, gated: tuple[int, ...]) -> None:
        super().__init__()
        self.number = next(i for i in range(99) if is_first(folder / f"drawn{i}"))
        self.gate = folder / f"open{self.number}" if self.number in gated else None

    def observe(self) -> Any:
        """The number, in all entries."""
        return np.full(3, float(self.number))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait for the gate, then step."""
        while self.gate is not None and not self.gate.exists():
            time.sleep(0.01)
        return super().step(action)


class SlowEnv(ActorEnv):
    """Takes a while for each step, and leaves a file when it is closed.

    Args:
        folder: Where the file `closed{process}` is left.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, in no hurry."""
        time.sleep(0.3)
        return super().step(action)

    def close(self) -> None:
        """Leave the file."""
        (self.folder / f"closed{os.getpid()}").touch()


class BrokenLaterEnv(ActorEnv):
    """Can not be built once a file is there."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        if marker.exists():
            raise ValueError("no such level")


class OddOneOutEnv(ActorEnv):
    """One of all that are built has another observation space."""

    def __init__(self, marker: Path) -> None:
        super().__init__("dict" if is_first(marker) else "box")


def stacked_env(actions: str = "discrete") -> gymnasium.Env[Any, Any]:
    """Stacks of the last three images."""
    return ObservationStackWrapper(ActorEnv("image", actions), 3)


def vector_of(
    make: Callable[[], gymnasium.Env[Any, Any]],
    num_envs: int = E,
    skips: bool = False,
    first_env: int = 0,
    *,
    can_be_restored: bool = True,
) -> MazeVectorEnv:
    """So many environments in one process."""
    return SequentialVectorEnv(
        [make] * num_envs,
        on_non_finite="skip" if skips else "raise",
        can_be_restored=can_be_restored,
        first_env=first_env,
    )


def model_maker(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    *,
    memory: bool = False,
    normalises: bool = False,
) -> Callable[[], ActorCriticModel]:
    """What builds a small model, in whatever process."""
    config = ModelConfig(hidden_sizes=[8], memory=MemoryConfig(size=4) if memory else None)
    config.normalization.mode = "running" if normalises else "none"
    return partial(build_actor_critic, config, observation_space, action_space, 0)


def maker_for(env: MazeVectorEnv, *, memory: bool = False) -> Callable[[], ActorCriticModel]:
    """What builds a model for environments."""
    return model_maker(env.env_observation_space, env.single_action_space, memory=memory)


@torch.no_grad()
def set_version(model: torch.nn.Module, version: int) -> None:
    """Give a model weights that follow from a number, and with which it acts in many ways."""
    generator = torch.Generator().manual_seed(version)
    for param in model.parameters():
        param.copy_(torch.randn(param.shape, generator=generator))


def whole(leaf: Tensor | FrameStacks) -> Tensor:
    """A tensor of what may be stacks of frames."""
    if isinstance(leaf, FrameStacks):
        return leaf[0 : len(leaf.numbers)].view(leaf.shape)
    return leaf


def columns_of(rollout: Rollout) -> Iterator[tuple[str, Tensor]]:
    """The leaves of the columns by name, stacks of frames put together."""
    for name in (
        "obs", "actions", "rewards", "terminated", "truncated", "final_obs", "final_positions",
        "hidden_states", "log_probs", "weights_seq_no",
    ):  # fmt: skip
        tree = getattr(rollout, name)
        for i, leaf in enumerate(tree_leaves(tree) if tree is not None else ()):
            yield f"{name}{i}", whole(leaf)


def assert_same(one: Rollout, other: Rollout) -> None:
    """Equal columns, bit for bit."""
    ours, theirs = dict(columns_of(one)), dict(columns_of(other))
    assert ours.keys() == theirs.keys()
    for name, column in ours.items():
        assert column.dtype == theirs[name].dtype, name
        assert torch.equal(column, theirs[name]), name


def reference_collector(
    env: MazeVectorEnv, actor: int, generation: int = 0, num_steps: int = T
) -> RolloutCollector:
    """The collector that an actor is, in this process."""
    name = f"actors/{actor}/{generation}"
    return RolloutCollector(
        env,
        num_steps,
        env_seed=SEED_OF(f"{name}/episodes"),
        action_seed=SEED_OF(f"{name}/actions"),
        records_log_probs=True,
    )


@torch.no_grad()
def slow_log_probs(rollout: Rollout, model: ActorCriticModel) -> Tensor:
    """Log-probabilities of the actions of a rollout, step by step under a model."""
    rows = []
    for t in range(len(rollout.rewards)):

        def row(leaf: Tensor | FrameStacks, t: int = t) -> Tensor:
            return whole(leaf)[t]

        obs = tree_map(row, rollout.obs)
        if rollout.hidden_states is None:
            params = model.policy_params(obs)
        else:
            params, _ = model.policy_step(obs, rollout.hidden_states[t])
        rows.append(model.distribution.log_prob(params, tree_map(row, rollout.actions)))
    return torch.stack(rows)
