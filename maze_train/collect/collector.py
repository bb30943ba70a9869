"""Collectors: step the training environments with acting models, and return rollouts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import numpy as np
import torch
from torch import nn

from maze_train.collect.episodes import EpisodeTracker, FinishedEpisodes
from maze_train.core.errors import EnvError
from maze_train.core.step_end import DROPPED, TRUNCATED, StepBatch, is_followed_by_new
from maze_train.core.types import Array, Tensor, is_on, send, tree_map
from maze_train.data.rollout import Rollout, RolloutStorage, rollout_columns
from maze_train.data.turns import TurnOptions, TurnSplitter
from maze_train.envs.calls import EnvCall
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.acting import ActingModel, Actor, as_arrays
from maze_train.nets.joint import JointModel
from maze_train.spaces.tensors import check_resolution, large_floats

if TYPE_CHECKING:
    from maze_train.data.turns import TurnSplitter


class SingleModule:
    """Assigns rollouts to the single module; the single-agent counterpart of `TurnSplitter`."""

    def split(self, rollout: Rollout) -> dict[str, Rollout]:
        """Return the rollout under the id of the module."""
        return {DEFAULT_MODULE: rollout}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any], lost: Tensor) -> None:
        """Do nothing, because there is no state."""


Turns: TypeAlias = "SingleModule | TurnSplitter"
"""Splits a rollout into one rollout per module."""


class Collector(ABC):
    """Base class of collectors. A collector returns one rollout per module.

    Attributes:
        turns: Splits the rollout of all steps by module.
        records_log_probs: Whether rollouts include the log-probabilities of the actions.
        keeps_terminal_obs: Whether rollouts also include final observations of terminated episodes.
        env_s: Time in seconds spent in environments, or waiting for them, in the last rollout.
        is_exact: Whether `load_state_dict` restored all environments exactly.
    """

    records_log_probs: bool = False
    keeps_terminal_obs: bool = False
    env_s: float = 0.0
    is_exact: bool = True

    def __init__(self) -> None:
        self.turns: Turns = SingleModule()

    @property
    def stepping(self) -> RolloutCollector | None:
        """The collector that steps environments in this process; None if actors are used."""
        return None

    def split_turns(self, turns: Turns, *, records_log_probs: bool = False) -> None:
        """Split rollouts by the policies of a multi-agent model.

        Args:
            turns: Splits the rollout by policy.
            records_log_probs: See the class.
        """
        self.keeps_terminal_obs, self.records_log_probs = True, records_log_probs
        self.turns = turns

    def collect(
        self, model: nn.Module, overlap: Callable[[], object] | None = None
    ) -> tuple[dict[str, Rollout], FinishedEpisodes]:
        """Collect one rollout.

        Args:
            model: The acting model; may be a multi-agent model.
            overlap: See `collect_steps`.

        Returns:
            The rollouts, keyed by module id, and the finished episodes. Later calls may overwrite
            the rollouts. Multi-agent rollouts contain the finished turns.
        """
        rollout, episodes = self.collect_steps(model, overlap)
        return self.turns.split(rollout), episodes

    @abstractmethod
    def collect_steps(
        self, model: nn.Module, overlap: Callable[[], object] | None = None
    ) -> tuple[Rollout, FinishedEpisodes]:
        """Collect T steps of all environments, with observations and actions of all agents."""

    @abstractmethod
    def make_calls(self) -> None:
        """Make new calls in the environments between two rollouts, see `EnvCalls`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environments and of unfinished turns; call between rollouts."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Restore from `state`.

        Returns:
            Mask `[B]` of environments that begin a new episode.

        Raises:
            EnvError: If an environment cannot be restored and new episodes are not allowed.
        """


class RolloutCollector(Collector):
    """Collects T steps of vectorized environments with a policy.

    Episodes continue across rollouts. Action noise is sampled once per rollout from a separate
    generator, so results do not depend on the process in which environments are stepped.

    Args:
        env: Environments with automatic reset.
        num_steps: Number of steps T per rollout.
        env_seed: Seed of the episodes.
        action_seed: Seed of the actions.
        device: Device of the policy.
        allow_new_episodes: If True, environments that cannot be restored begin new episodes;
            otherwise an error is raised.
        records_log_probs: See `Collector`.
        on_step: Function to call with the results of each step. If the function raises, the rollout
            is aborted, and the environments must be closed.
        info_keys: Keys of final infos to report with the episodes.
        calls: List of all environment calls of the run. Calls appended to the list are made before
            the next rollout.
    """

    def __init__(
        self,
        env: MazeVectorEnv,
        num_steps: int,
        *,
        env_seed: int,
        action_seed: int,
        device: torch.device | str = "cpu",
        allow_new_episodes: bool = False,
        records_log_probs: bool = False,
        on_step: Callable[[StepBatch[Any]], object] = lambda batch: None,
        info_keys: Sequence[str] = (),
        calls: Sequence[EnvCall] = (),
    ) -> None:
        super().__init__()
        self.env, self.calls = env, calls
        self.num_steps = num_steps
        self.num_envs = env.num_envs
        self.device = torch.device(device)
        self.episodes = EpisodeTracker(self.num_envs)
        self.generator = torch.Generator().manual_seed(action_seed)
        self._env_seed = env_seed
        self._allow_new_episodes = allow_new_episodes
        self.records_log_probs = records_log_probs
        self._info_keys = info_keys
        self.on_step = on_step
        self._obs: Any = None
        self._memory: Tensor | None = None
        self._model: nn.Module | None = None
        self._actor: Actor | None = None
        self._storage: RolloutStorage | None = None

    @property
    def stepping(self) -> RolloutCollector:
        """This collector."""
        return self

    @property
    def obs_nbytes(self) -> int:
        """Size of the observations of a rollout in bytes; 0 before the first rollout."""
        return 0 if self._storage is None else self._storage.obs_nbytes

    def make_calls(self) -> None:
        """Make new calls in the environments between two rollouts, see `EnvCalls`."""
        self.env.make_calls(self.calls)

    @torch.no_grad()
    def collect_steps(
        self,
        model: nn.Module,
        overlap: Callable[[], object] | None = None,
        into: RolloutStorage | None = None,
    ) -> tuple[Rollout, FinishedEpisodes]:
        """Collect T steps of all environments.

        Args:
            model: The acting model.
            overlap: Function to call once during the last environment step, with gradients enabled.
                The function may change the weights, because all actions have been sampled, but must
                not use the environments. If the function raises, the environments must be closed.
            into: Memory for the rollout; None selects internal memory. Ignored for simulators.

        Returns:
            The rollout, in memory that the next call overwrites, and the finished episodes.
        """
        env, on_device = self.env, self.env.device
        self.env_s, began = 0.0, time.perf_counter()
        env.make_calls(self.calls)
        large: dict[str, Array] = {}
        if self._obs is None:
            self._obs = env.reset(seed=self._env_seed)[0]
            self.env_s = time.perf_counter() - began
            if on_device is None:
                large = large_floats(env.single_observation_space, self._obs)
        actor, storage = self._actor_and_storage(model, into)
        noise = send(self._noise(actor.model), self.device).unbind(0)
        moves = not is_on(storage.rewards, self.device)
        params: list[Tensor] = []
        episodes, restarts = FinishedEpisodes(), env.worker_restarts
        storage.start(self._obs)
        for step in range(self.num_steps):
            obs = storage.acting_obs(step)
            if moves:
                obs = tree_map(lambda x: send(x, self.device), obs)
            if actor.state_size:
                storage.write_hidden_state(step, actor.hidden_state)
            acted = actor.act(obs, noise[step], False)
            if self.records_log_probs:
                params.append(acted.params)
            actions: Any = acted.actions
            env_actions: Any = acted.env_actions
            if on_device is None:
                is_same = actions is env_actions
                env_actions = as_arrays(env_actions)
                actions = env_actions if is_same else as_arrays(actions)
            storage.write_actions(step, actions)
            began = time.perf_counter()
            env.step_async(env_actions)
            if overlap is not None and step == self.num_steps - 1:
                self.env_s += time.perf_counter() - began
                with torch.enable_grad():
                    overlap()
                began = time.perf_counter()
            batch = env.receive()
            self.env_s += time.perf_counter() - began
            self._obs = batch.obs
            self.on_step(batch)
            storage.write_step(step, batch.obs, batch.rewards, batch.end, batch.has_gaps)
            if batch.ends or batch.has_gaps or on_device is not None:
                self._read_ends(step, batch, actor, storage, episodes)
        check_resolution(large, self._obs)
        if actor.state_size:
            storage.write_hidden_state(self.num_steps, actor.hidden_state)
        rollout = self._rollout(storage)
        if params:
            # One batch is cheaper than one call per step. The weights have not changed yet.
            stacked = torch.stack(params).to(storage.device)
            rollout = replace(rollout, log_probs=actor.model.log_probs(stacked, rollout.actions))
        episodes.steps = rollout.num_samples
        episodes.worker_restarts = env.worker_restarts - restarts
        return rollout, self._finished(rollout, episodes)

    def _noise(self, model: ActingModel) -> Tensor:
        """Sample the noise of the actions of a rollout, `[T, B, ...]`."""
        first, total = self.env.first_env, self.env.total_envs or self.num_envs
        shape, cpu = (self.num_steps, total), torch.device("cpu")
        noise = model.draw_noise(shape, self.generator, cpu)
        if total == self.num_envs:
            return noise
        # Noise is sampled for all environments; this process uses the noise of its own
        # environments.
        return noise[:, first : first + self.num_envs]

    def _actor_and_storage(
        self, model: nn.Module, into: RolloutStorage | None
    ) -> tuple[Actor, RolloutStorage]:
        """Return the cached actor of `model` and the cached storage of its rollouts."""
        if self._actor is None or self._model is not model:
            self._model = model
            memory = self._memory if self._actor is None else self._actor.hidden_state
            self._actor, self._memory = Actor(model, self.num_envs, self.device), None
            if memory is not None and memory.shape == self._actor.hidden_state.shape:
                # Episodes continue with the new model, for example after random warm-up steps.
                self._actor.hidden_state = memory.to(self.device)
            self._storage = None
        if into is not None and self.env.device is None:
            self._storage = into
        if self._storage is None:
            columns = rollout_columns(
                self.env.single_observation_space,
                self._actor.model.example_actions(),
                self.num_steps,
                self.num_envs,
                state_size=self._actor.state_size,
                keeps_final_obs=self.env.device is None,
            )
            self._storage = RolloutStorage(columns, device=self.env.device)
        return self._actor, self._storage

    def _read_ends(
        self,
        step: int,
        batch: StepBatch[Any],
        actor: Actor,
        storage: RolloutStorage,
        reports: FinishedEpisodes,
    ) -> None:
        """Store the required final observations, and record values from final infos."""
        for end in batch.ends:
            if self.keeps_terminal_obs or batch.end[end.env] == TRUNCATED:
                assert batch.final_obs is not None
                storage.write_final_obs(step, end.env, batch.final_obs)
            reports.add_end(end, self._info_keys, self.env.agents)
        if batch.has_gaps:
            reports.lost += int((batch.end == DROPPED).sum())
        actor.forget(is_followed_by_new(batch.end))

    def _rollout(self, storage: RolloutStorage) -> Rollout:
        """Return the finished rollout."""
        return storage.rollout()

    def _finished(self, rollout: Rollout, reports: FinishedEpisodes) -> FinishedEpisodes:
        """Return the finished episodes, as reported by monitors or derived from the end codes."""
        if self.env.monitored:
            return reports
        assert self._storage is not None
        rewards = self._storage.precise_rewards.numpy()
        finished = self.episodes.follow(rewards, rollout.end.numpy())
        return replace(reports, returns=finished.returns, lengths=finished.lengths)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of environments, unfinished turns, recurrent policy and action noise.

        Call between rollouts.
        """
        memory = self._memory if self._actor is None else self._actor.hidden_state
        return {
            "generator": self.generator.get_state(),
            "episodes": self.episodes.state_dict(),
            "has_begun": self._obs is not None,
            "env": self.env.state_dict() if self.env.can_be_restored else None,
            "memory": memory,
            "turns": self.turns.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Restore from `state`; see `Collector`."""
        lost = np.zeros(self.num_envs, np.bool_)
        self.generator.set_state(state["generator"])
        self.episodes.load_state_dict(state["episodes"])
        self._obs, self._actor, self._memory = None, None, state["memory"]
        if state["has_begun"] and state["env"] is not None:
            self._obs, lost = self.env.load_state_dict(
                state["env"], allow_new_episodes=self._allow_new_episodes
            )
        elif state["has_begun"]:
            self._begin_anew()
            lost[:] = True
        self.is_exact = self.env.is_exact and not lost.any()
        self.episodes.forget(lost)
        if self._memory is not None:
            self._memory = self._memory.clone()
            self._memory[torch.from_numpy(lost)] = 0.0
        self.turns.load_state_dict(state["turns"], torch.from_numpy(lost))
        return lost

    def _begin_anew(self) -> None:
        """Begin new episodes in environments that cannot be restored.

        Raises:
            EnvError: If new episodes are not allowed.
        """
        if not self._allow_new_episodes:
            raise EnvError(
                f"the running episodes of {type(self.env).__name__} were not saved, because "
                "third-party vector environments cannot be restored: set "
                "checkpoint.allow_new_episodes=true to begin new ones, or use env.backend=gymnasium"
            )
        # The new seed is reproducible and differs from the seed of the earlier episodes.
        generator = torch.Generator()
        generator.set_state(self.generator.get_state())
        self.make_calls()
        self._obs = self.env.reset(seed=int(torch.randint(2**31, (), generator=generator)))[0]


def turns_of(model: JointModel, **options: Unpack[TurnOptions]) -> TurnSplitter:
    """Create a `TurnSplitter` for the policies of a multi-agent model.

    Args:
        model: The policies and their agents.
        **options: Other arguments of `TurnSplitter`.
    """
    sizes, centralized = model.state_sizes, model.centralized
    return TurnSplitter(model.members, sizes, centralized=centralized, **options)
