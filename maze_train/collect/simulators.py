"""Collects rollouts from simulators without copying tensors off their device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from maze_train.collect.collector import RolloutCollector
from maze_train.collect.episodes import FinishedEpisodes
from maze_train.core.errors import EnvError
from maze_train.core.notices import notify
from maze_train.core.step_end import StepBatch, has_ended
from maze_train.core.types import Tensor, TensorTree, leaves_by_key, precise_dtype, tree_map
from maze_train.data.rollout import Rollout, RolloutStorage
from maze_train.envs.batch import SUCCESS
from maze_train.envs.vector import MazeVectorEnv
from maze_train.nets.acting import Actor
from maze_train.simulators.simulator import Simulator
from maze_train.spaces.tensors import zeros_for

NOT_GIVEN = {
    "as_termination": "time limits are treated as termination (env.truncation=as_termination)",
    "bootstrap_previous": "at a time limit, the value of the previous observation is used to "
    "bootstrap (env.truncation=bootstrap_previous; as_termination does not bootstrap)",
}
"""Descriptions of `env.truncation`, for messages."""


class SimulatorCollector(RolloutCollector):
    """Collects T steps from a simulator, and synchronises the device only after the last step.

    If an episode is truncated and the simulator does not return its final observation, the value
    target is r_t + gamma V(s_t) (`Simulator.truncation` = `bootstrap_previous`) or r_t
    (`as_termination`).

    Args:
        *args: See `RolloutCollector`; the environments must wrap a simulator.
        **settings: See `RolloutCollector`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.simulator: Simulator = self.env.simulator
        self._final_rows: TensorTree | None = None
        self._final_given = [False] * self.num_steps
        self._numbers: dict[str, list[tuple[int, Tensor]]] = {}
        self._is_told = False

    def _read_ends(
        self,
        step: int,
        batch: StepBatch[Tensor],
        actor: Actor,
        storage: RolloutStorage,
        reports: FinishedEpisodes,
    ) -> None:
        """Store final observations and reported metrics without synchronising the device."""
        self._final_given[step] = batch.final_obs is not None
        if batch.final_obs is not None:
            self._write_final(step, storage, batch.final_obs)
        for key in (SUCCESS, *self._info_keys):
            if key in batch.columns:
                # The values are copied, because the simulator may overwrite the memory in the next
                # step.
                self._numbers.setdefault(key, []).append((step, batch.columns[key].clone()))
        if actor.state_size:
            actor.forget(has_ended(batch.end).to(actor.hidden_state.device))

    def _write_final(self, step: int, storage: RolloutStorage, obs: TensorTree) -> None:
        """Store the final observations of a step; rows of running episodes are arbitrary."""
        if self._final_rows is None:
            shape = self.num_steps, self.num_envs
            zeros = zeros_for(self.env.single_observation_space, shape)
            self._final_rows = tree_map(lambda x: x.to(storage.device), zeros)
        leaves = leaves_by_key(obs)
        for key, rows in leaves_by_key(self._final_rows).items():
            rows[step] = leaves[key]

    def _rollout(self, storage: RolloutStorage) -> Rollout:
        """Return the finished rollout with the final observations needed for bootstrapping.

        Raises:
            EnvError: If an observation or a reward is not finite.
        """
        rollout = storage.rollout()
        # The observations are copied, because the next step overwrites the storage.
        self._obs = tree_map(lambda x: x[-1].clone(), rollout.obs)
        kept = rollout.ended if self.keeps_terminal_obs else rollout.truncated
        given = torch.tensor(self._final_given, device=kept.device)
        missing = kept & ~given[:, None]
        is_missing = bool(missing.any())
        if (is_missing or bool(self.simulator.replaced_ends)) and not self._is_told:
            self._is_told = True
            if not self.env.first_env:  # Only the first of several actors prints the note.
                meaning = NOT_GIVEN[self.simulator.truncation]
                notify(f"note: {self.simulator.name} returns no final observations: {meaning}")
        is_recurrent = rollout.hidden_states is not None
        if is_missing and (is_recurrent or self.simulator.truncation == "as_termination"):
            # The previous observation would update the recurrent state twice.
            kept = kept & ~missing
        positions = kept.flatten().nonzero().squeeze(1)
        final_obs = tree_map(lambda x: x[:-1].flatten(0, 1)[positions], rollout.obs)
        if self._final_rows is not None:
            given = ~missing.flatten()[positions]
            leaves = leaves_by_key(final_obs)
            for key, rows in leaves_by_key(self._final_rows).items():
                leaves[key][given] = rows.flatten(0, 1)[positions[given]]
        rollout = replace(rollout, final_obs=final_obs, final_positions=positions)
        self._check_finite(rollout)
        return rollout

    def _check_finite(self, rollout: Rollout) -> None:
        """Raise EnvError on NaN or infinity, synchronising the device once for all tensors."""
        obs, final_obs = leaves_by_key(rollout.obs), leaves_by_key(rollout.final_obs)
        rows = torch.arange((self.num_steps + 1) * self.num_envs, device=rollout.rewards.device)
        named = [("an observation", leaf.flatten(0, 1), rows) for leaf in obs.values()]
        last = rollout.final_positions
        named += [("a last observation", leaf, last) for leaf in final_obs.values()]
        named.append(("a reward", rollout.rewards.flatten(), rows))
        floats = [own for own in named if own[1].is_floating_point()]
        # The float64 sum of float32 values is finite if and only if all values are finite.
        precise = precise_dtype(rollout.rewards.device)
        sums = torch.stack([leaf.sum(dtype=precise) for _, leaf, _ in floats])
        if bool(sums.isfinite().all()):
            return
        for what, leaf, positions in floats:
            bad = (~leaf.isfinite()).reshape(len(leaf), -1).any(-1)
            if bad.any():
                step, env = divmod(int(positions[bad.nonzero()[0]]), self.num_envs)
                raise EnvError(
                    f"environment {env} of {self.simulator.name} returned {what} that is not "
                    f"finite in step {step} of a rollout"
                )

    def _finished(self, rollout: Rollout, reports: FinishedEpisodes) -> FinishedEpisodes:
        """Return the finished episodes, with the metrics from infos."""
        cpu = torch.device("cpu")
        end = rollout.end.to(cpu)
        ended = has_ended(end)
        for key, values in self._numbers.items():
            target = reports.successes if key == SUCCESS else reports.infos.setdefault(key, [])
            if means := [x for _, x in values if not x.ndim]:
                target += map(float, torch.stack(means).tolist())
            if rows := [(step, x) for step, x in values if x.ndim]:
                steps, columns = zip(*rows, strict=True)
                target += map(float, torch.stack(columns).to(cpu)[ended[list(steps)]].tolist())
        if all(x.ndim for _, x in self._numbers.get(SUCCESS, ())):  # Not means over environments.
            reports.successes += [math.nan] * (int(ended.sum()) - len(reports.successes))
        self._numbers.clear()
        assert self._storage is not None
        rewards = self._storage.precise_rewards.to(cpu).numpy()
        finished = self.episodes.follow(rewards, end.numpy())
        return replace(reports, returns=finished.returns, lengths=finished.lengths)


def collector_class(env: MazeVectorEnv) -> type[RolloutCollector]:
    """Return the collector class for these environments."""
    return RolloutCollector if env.simulator is None else SimulatorCollector
