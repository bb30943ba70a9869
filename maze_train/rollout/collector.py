"""Collects rollouts: the one place where training steps environments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from maze_train.data.rollout import RolloutStorage
from maze_train.rollout.episodes import EpisodeTracker, FinishedEpisodes, successes_of
from maze_train.trees import tree_map

if TYPE_CHECKING:
    from maze_train.data.rollout import Rollout
    from maze_train.distributions.base import Distribution
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.types import ArrayTree, Tensor, TensorTree

__all__ = ["ActingModel", "RolloutCollector", "env_actions"]


class ActingModel(Protocol):
    """What acts: anything that gives the parameters of an action distribution."""

    @property
    def distribution(self) -> Distribution:
        """The family of action distributions."""
        ...

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters for observations."""
        ...


def env_actions(distribution: Distribution, actions: TensorTree) -> ArrayTree:
    """Actions as `env.step` receives them: clipped or squashed to the space, as arrays."""
    return tree_map(lambda x: x.cpu().numpy(), distribution.to_env(actions))


class RolloutCollector:
    """Steps vectorised environments with a policy, T steps at a time.

    Episodes continue from one rollout to the next. The random numbers of actions are drawn for a
    whole rollout at once, from a generator of its own: which process steps the environments makes
    no difference.

    Args:
        env: Environments with SAME_STEP autoreset.
        num_steps: T.
        env_seed: Seed of the episodes.
        action_seed: Seed of the actions.
        device: Where the policy lives.
    """

    def __init__(
        self,
        env: MazeVectorEnv,
        num_steps: int,
        *,
        env_seed: int,
        action_seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.env = env
        self.num_steps = num_steps
        self.num_envs = env.num_envs
        self.device = torch.device(device)
        self.storage = RolloutStorage(env.single_observation_space, num_steps, self.num_envs)
        self.episodes = EpisodeTracker(self.num_envs)
        self.generator = torch.Generator().manual_seed(action_seed)
        self._env_seed = env_seed
        self._obs: ArrayTree | None = None

    @property
    def steps_per_rollout(self) -> int:
        """T * B."""
        return self.num_steps * self.num_envs

    @torch.no_grad()
    def collect(self, model: ActingModel) -> tuple[Rollout, FinishedEpisodes]:
        """Collect one rollout.

        Returns:
            The rollout, which shares memory with the next one, and the episodes that ended in it.
        """
        if self._obs is None:
            self._obs, _ = self.env.reset(seed=self._env_seed)
        storage, distribution = self.storage, model.distribution
        shape = (self.num_steps, self.num_envs)
        noise = distribution.draw_noise(shape, self.generator, torch.device("cpu"))
        noise_rows = noise.to(self.device).unbind(0)
        on_cpu = self.device.type == "cpu"
        successes: list[float] = []
        storage.start(self._obs)
        for step in range(self.num_steps):
            obs = storage.obs_rows[step]
            if not on_cpu:
                obs = tree_map(lambda x: x.to(self.device, non_blocking=True), obs)
            actions = distribution.sample(model.policy_params(obs), noise_rows[step])
            storage.write_actions(step, actions)
            self._obs, rewards, terminated, truncated, infos = self.env.step(
                env_actions(distribution, actions)
            )
            storage.write_step(step, self._obs, rewards, terminated, truncated)
            if infos:
                successes += self._read_infos(step, terminated, truncated, infos)
        rollout = storage.rollout()
        done = (rollout.terminated | rollout.truncated).numpy()
        finished = self.episodes.follow(rollout.rewards.numpy(), done)
        finished.successes = successes
        return rollout, finished

    def _read_infos(
        self, step: int, terminated: Any, truncated: Any, infos: dict[str, Any]
    ) -> list[float]:
        """Keep final observations where the return is bootstrapped, and collect successes."""
        for env in (truncated & ~terminated).nonzero()[0]:
            self.storage.write_final_obs(step, int(env), infos["final_obs"][env])
        return list(successes_of(infos).values())

    def state_dict(self) -> dict[str, Any]:
        """Random generator of the actions."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the environments start new episodes."""
        self.generator.set_state(state["generator"])
        self.episodes = EpisodeTracker(self.num_envs)
        self._obs = None
