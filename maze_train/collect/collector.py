"""Collects rollouts with acting models: the one place where training steps environments."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import nn

from maze_train.collect.episodes import EpisodeTracker, FinishedEpisodes
from maze_train.core.errors import EnvError
from maze_train.core.step_end import DROPPED, TRUNCATED, StepBatch, is_followed_by_new
from maze_train.core.types import Array, Tensor, TensorTree, is_on, send, tree_map
from maze_train.data.rollout import Rollout, RolloutStorage, rollout_columns
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.acting import Actor, as_arrays
from maze_train.spaces.tensors import check_resolution, large_floats

if TYPE_CHECKING:
    from maze_train.data.turns import TurnSplitter


class OneModule:
    """Gives rollouts to the only module; what a `TurnSplitter` is where there are several."""

    def split(self, rollout: Rollout) -> dict[str, Rollout]:
        """The rollout, by the id of the module."""
        return {DEFAULT_MODULE: rollout}

    def forget(self, envs: Tensor) -> None:
        """Nothing is remembered."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to continue from."""


Turns: TypeAlias = "OneModule | TurnSplitter"
"""Makes the rollouts of modules from the rollout of all steps."""


class Collector(ABC):
    """Base of what collects rollouts and gives each module its own.

    Attributes:
        turns: Makes the rollouts of modules from that of all steps.
        records_log_probs: Whether rollouts have the log-probabilities of their actions.
        keeps_terminal_obs: Whether rollouts have the last observations of terminated episodes as
            well.
        env_s: Seconds that the last rollout spent in the environments, or waiting for them.
        is_exact: Whether `load_state_dict` put all environments exactly where they were.
    """

    records_log_probs: bool = False
    keeps_terminal_obs: bool = False
    env_s: float = 0.0
    is_exact: bool = True

    def __init__(self) -> None:
        self.turns: Turns = OneModule()

    def split_turns(self, turns: Turns, *, records_log_probs: bool = False) -> None:
        """Give the policies of several agents their turns.

        Args:
            turns: Makes the rollouts of the policies.
            records_log_probs: See the class.
        """
        self.keeps_terminal_obs, self.records_log_probs = True, records_log_probs
        self.turns = turns

    def collect(
        self, model: nn.Module, meanwhile: Callable[[], object] | None = None
    ) -> tuple[dict[str, Rollout], FinishedEpisodes]:
        """Collect one rollout.

        Args:
            model: The acting model, of one agent or of several.
            meanwhile: See `collect_steps`.

        Returns:
            The rollouts by module id, of several agents those of the turns that ended, which share
            memory with the next ones; and the episodes that ended.
        """
        rollout, episodes = self.collect_steps(model, meanwhile)
        return self.turns.split(rollout), episodes

    @abstractmethod
    def collect_steps(
        self, model: nn.Module, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Rollout, FinishedEpisodes]:
        """Collect T steps of all environments, with the observations and actions of all agents."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State of the environments and of the turns that have not ended.

        Valid between two rollouts.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Continue from `state`.

        Returns:
            Which environments begin a new episode, `[B]` bool.

        Raises:
            EnvError: If an environment cannot be put back, and new episodes are not allowed.
        """


class RolloutCollector(Collector):
    """Steps vectorised environments with a policy, T steps at a time.

    Episodes continue from one rollout to the next. The random numbers of actions are drawn for a
    whole rollout at once, from its own generator: which process steps the environments makes
    no difference.

    Args:
        env: Environments that begin new episodes by themselves.
        num_steps: T.
        env_seed: Seed of the episodes.
        action_seed: Seed of the actions.
        device: Where the policy lives.
        allow_new_episodes: Whether an environment that cannot be put back where a state says
            begins a new episode; otherwise that is an error.
        records_log_probs: See `Collector`.
        on_step: Called after each step of the environments; what it raises goes through, and ends
            the rollout half-way: the environments can then only be closed.
        info_keys: Keys of last infos whose numbers are reported with the episodes.
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
        on_step: Callable[[], object] | None = None,
        info_keys: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.env = env
        self.num_steps = num_steps
        self.num_envs = env.num_envs
        self.device = torch.device(device)
        self.episodes = EpisodeTracker(self.num_envs)
        self.generator = torch.Generator().manual_seed(action_seed)
        self._env_seed = env_seed
        self._allow_new_episodes = allow_new_episodes
        self.records_log_probs = records_log_probs
        self._info_keys = info_keys
        self._on_step = on_step or (lambda: None)
        self._obs: Any = None
        self._memory: Tensor | None = None
        self._model: nn.Module | None = None
        self._actor: Actor | None = None
        self._storage: RolloutStorage | None = None

    @property
    def obs_nbytes(self) -> int:
        """Bytes of the observations of a rollout; 0 before the first one."""
        return 0 if self._storage is None else self._storage.obs_nbytes

    @torch.no_grad()
    def collect_steps(
        self,
        model: nn.Module,
        meanwhile: Callable[[], object] | None = None,
        into: RolloutStorage | None = None,
    ) -> tuple[Rollout, FinishedEpisodes]:
        """Collect T steps of all environments.

        Args:
            model: The acting model.
            meanwhile: Called once, with gradients enabled, while the environments make the last
                step, whose actions are chosen by then: so weights may change in it. It must not
                use the environments. What it raises goes through, and ends the step half-way: the
                environments can then only be closed.
            into: Memory for the rollout, unless a simulator makes it; None: own memory.

        Returns:
            The rollout, which shares memory with the next one, and the episodes that ended in it.
        """
        self.env_s, began = 0.0, time.perf_counter()
        large: dict[str, Array] = {}
        if self._obs is None:
            self._obs = self._reset(self._env_seed)
            self.env_s = time.perf_counter() - began
            if self._storage_device is None:
                large = large_floats(self.env.single_observation_space, self._obs)
        actor, storage = self._actor_and_storage(model, into)
        shape = (self.num_steps, self.num_envs)
        noise = actor.model.draw_noise(shape, self.generator, torch.device("cpu"))
        noise_rows = send(noise, self.device).unbind(0)
        moves = not is_on(storage.rewards, self.device)
        reports = FinishedEpisodes()
        restarts_before = self.env.worker_restarts
        kept_params: list[Tensor] = []
        storage.start(self._obs)
        for step in range(self.num_steps):
            obs = storage.acting_obs(step)
            if moves:
                obs = tree_map(lambda x: send(x, self.device), obs)
            if actor.state_size:
                storage.write_hidden_state(step, actor.hidden_state)
            acted = actor.act(obs, noise_rows[step], False)
            if self.records_log_probs:
                kept_params.append(acted.params)
            storage.write_actions(step, acted.actions)
            began = time.perf_counter()
            self._begin_step(acted.env_actions)
            if meanwhile is not None and step == self.num_steps - 1:
                self.env_s += time.perf_counter() - began
                with torch.enable_grad():
                    meanwhile()
                began = time.perf_counter()
            self._finish_step(step, actor, storage, reports, began)
        check_resolution(large, self._obs)
        if actor.state_size:
            storage.write_hidden_state(self.num_steps, actor.hidden_state)
        rollout = self._rollout(storage)
        if kept_params:
            # All at once, while the weights are those that acted: step by step it would cost more.
            params = torch.stack(kept_params).to(storage.device)
            rollout = replace(rollout, log_probs=actor.model.log_probs(params, rollout.actions))
        reports.steps = rollout.num_samples
        reports.worker_restarts = self.env.worker_restarts - restarts_before
        return rollout, self._finished(rollout, reports)

    def _actor_and_storage(
        self, model: nn.Module, into: RolloutStorage | None
    ) -> tuple[Actor, RolloutStorage]:
        """Return the actor of `model`, and the storage for its rollouts; both are kept."""
        if self._actor is None or self._model is not model:
            self._model = model
            memory = self._memory if self._actor is None else self._actor.hidden_state
            self._actor, self._memory = Actor(model, self.num_envs, self.device), None
            if memory is not None and memory.shape == self._actor.hidden_state.shape:
                # Episodes continue where another model acts, such as the first that was not random.
                self._actor.hidden_state = memory.to(self.device)
            self._storage = None
        if into is not None and self._storage_device is None:
            self._storage = into
        if self._storage is None:
            columns = rollout_columns(
                self.env.single_observation_space,
                self._actor.model.example_actions(),
                self.num_steps,
                self.num_envs,
                state_size=self._actor.state_size,
                keeps_final_obs=self._storage_device is None,
            )
            self._storage = RolloutStorage(columns, device=self._storage_device)
        return self._actor, self._storage

    # -- what the environments give and take -------------------------------------------------------

    @property
    def _storage_device(self) -> torch.device | None:
        """Where rollouts lie; None: on the CPU, and environments give arrays."""
        return None

    def _reset(self, seed: int) -> Any:
        """The first observations of new episodes."""
        return self.env.reset(seed=seed)[0]

    def _begin_step(self, env_actions: TensorTree) -> None:
        """Begin a step of the environments."""
        self.env.step_async(as_arrays(env_actions))

    def _finish_step(
        self,
        step: int,
        actor: Actor,
        storage: RolloutStorage,
        reports: FinishedEpisodes,
        began: float,
    ) -> None:
        """Finish a step of the environments, and store what it brought."""
        batch = self.env.receive()
        self.env_s += time.perf_counter() - began
        self._obs = batch.obs
        self._on_step()
        storage.write_step(step, batch.obs, batch.rewards, batch.end, batch.has_gaps)
        if batch.ends or batch.has_gaps:
            self._read_ends(step, batch, storage, reports)
            actor.forget(is_followed_by_new(batch.end))

    def _rollout(self, storage: RolloutStorage) -> Rollout:
        """The finished rollout."""
        return storage.rollout()

    def _finished(self, rollout: Rollout, reports: FinishedEpisodes) -> FinishedEpisodes:
        """The episodes that ended: as monitored environments report them, or by the flags."""
        if self.env.monitored:
            return reports
        assert self._storage is not None
        rewards = self._storage.precise_rewards.numpy()
        finished = self.episodes.follow(rewards, rollout.end.numpy())
        return replace(reports, returns=finished.returns, lengths=finished.lengths)

    def _read_ends(
        self, step: int, batch: StepBatch[Array], storage: RolloutStorage, reports: FinishedEpisodes
    ) -> None:
        """Keep final observations that someone needs, and what infos report."""
        for end in batch.ends:
            if self.keeps_terminal_obs or batch.end[end.env] == TRUNCATED:
                assert batch.final_obs is not None
                storage.write_final_obs(step, end.env, batch.final_obs)
            reports.add_end(end, self._info_keys, self.env.agents)
        if batch.has_gaps:
            reports.lost += int((batch.end == DROPPED).sum())

    def state_dict(self) -> dict[str, Any]:
        """State of environments, turns, the policy's memory, and the action noise.

        Valid between two rollouts.
        """
        memory = self._memory if self._actor is None else self._actor.hidden_state
        return {
            "generator": self.generator.get_state(),
            "episodes": self.episodes.state_dict(),
            "has_begun": self._obs is not None,
            "env": self._env_state(),
            "memory": memory,
            "turns": self.turns.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Continue from `state`; see `Collector`."""
        lost = np.zeros(self.num_envs, np.bool_)
        self.generator.set_state(state["generator"])
        self.episodes.load_state_dict(state["episodes"])
        self._obs, self._actor, self._memory = None, None, state["memory"]
        if state["has_begun"] and state["env"] is not None:
            lost = self._load_env_state(state["env"])
        elif state["has_begun"]:
            self._begin_anew()
            lost[:] = True
        self.is_exact = self.env.is_exact and not lost.any()
        self.episodes.forget(lost)
        if self._memory is not None:
            self._memory = self._memory.clone()
            self._memory[torch.from_numpy(lost)] = 0.0
        self.turns.load_state_dict(state["turns"])
        self.turns.forget(torch.from_numpy(lost))
        return lost

    def _env_state(self) -> dict[str, Any] | None:
        """The running episodes; None: they cannot be kept."""
        return self.env.state_dict() if self.env.can_be_restored else None

    def _load_env_state(self, state: dict[str, Any]) -> Array:
        """Continue the episodes of a state; returns which environments begin new ones, `[B]`."""
        self._obs, lost = self.env.load_state_dict(
            state, allow_new_episodes=self._allow_new_episodes
        )
        return lost

    def _begin_anew(self) -> None:
        """Begin new episodes in environments that cannot be put back.

        Raises:
            EnvError: If that is not allowed.
        """
        if not self._allow_new_episodes:
            raise EnvError(
                f"the running episodes of {type(self.env).__name__} were not kept, because vector "
                "environments of others cannot be put back where they were: set "
                "checkpoint.allow_new_episodes=true to begin new ones, or use env.backend=gymnasium"
            )
        # Others than those that were played before, and the same each time.
        generator = torch.Generator()
        generator.set_state(self.generator.get_state())
        self._obs = self._reset(int(torch.randint(2**31, (), generator=generator)))
