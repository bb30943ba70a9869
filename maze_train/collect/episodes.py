"""Returns, lengths and metrics of finished training episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maze_train.core.errors import TrainingError
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.notices import notify
from maze_train.core.step_end import EpisodeEnd, has_ended, is_followed_by_new
from maze_train.core.types import Array
from maze_train.envs.batch import SUCCESS, numbers_of, required_keys


class TrainingEpisodeEvents(EventInterface, prefix="train"):
    """Metrics of the training episodes that ended in an epoch; omitted if none ended."""

    episode_return_mean = Event(
        "Mean undiscounted return of the finished episodes; per agent in multi-agent "
        "environments: `train/<agent>/episode_return_mean`."
    )
    episode_return_max = Event("Largest return.", reduce="max")
    episode_return_min = Event("Smallest return.", reduce="min")
    episode_length_mean = Event("Mean number of steps.")
    episodes = Event("Number of finished episodes.", reduce="sum")
    success_rate = Event(
        "Fraction of episodes with a true `is_success` in the final info, once an episode of the "
        "run has reported it; per agent in multi-agent environments: `train/<agent>/success_rate`."
    )
    info = Event("Mean of a key of `tracking.info_keys` in final infos, as `train/info/<key>`.")
    lost_episodes = Event(
        "Number of episodes lost to worker failures or non-finite values.", reduce="sum"
    )
    worker_restarts = Event("Number of worker restarts.", reduce="sum")


NO_SUCCESS = (
    "note: some final infos contain no is_success, or NaN. These episodes count as failures, since "
    "others report is_success"
)


def note_on_success(successes: Sequence[float]) -> str:
    """Return a note if only some episodes report success, given one value (or NaN) per episode."""
    missing = np.isnan(successes)
    return NO_SUCCESS if missing.any() and not missing.all() else ""


class ReportedInfos:
    """One rule for missing values of final infos, in training and evaluations.

    Once an episode of the run has reported `is_success`, an episode without it counts as a failure.
    Missing values of other keys are left out. NaN is a missing value. Notes are printed once.

    Attributes:
        seen: Agents for which an episode reported `is_success`; "" for the whole environment.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._told: set[str] = set()

    def successes(self, values: Sequence[float] | Array, agent: str = "") -> Array | None:
        """Return successes as 1.0 or 0.0; None before the first reported one.

        Args:
            values: One value per episode; NaN if missing.
            agent: Name of an agent; "" for the whole environment.
        """
        given = np.asarray(values, np.float64)
        missing = np.isnan(given)
        if not missing.all():
            self.seen.add(agent)
        if agent not in self.seen or not len(given):
            return None
        if missing.any():
            self._tell("", NO_SUCCESS)
        return np.where(missing, 0.0, given)

    def finite(self, key: str, values: Sequence[float]) -> list[float]:
        """Return the values of a key without NaN."""
        kept = [value for value in values if value == value]
        if len(kept) < len(values):
            self._tell(key, f"note: NaN for {key} in final infos counts as missing")
        return kept

    def _tell(self, about: str, note: str) -> None:
        if about not in self._told:
            self._told.add(about)
            notify(note)


@dataclass
class FinishedEpisodes:
    """Episodes in the order in which they ended.

    Attributes:
        returns: Undiscounted sums of raw rewards.
        lengths: Numbers of steps.
        successes: 1.0 or 0.0 for each episode; NaN without `is_success` in the final info.
        infos: Values of the requested keys of final infos, by key.
        agent_returns: Sums of rewards by agent, in multi-agent environments.
        agent_successes: Like `successes`, by agent, in multi-agent environments.
        lost: Number of lost episodes, which all attributes above exclude.
        worker_restarts: Number of worker restarts.
        steps: Number of transitions collected in the same rollouts.
    """

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)
    infos: dict[str, list[float]] = field(default_factory=dict)
    agent_returns: dict[str, list[float]] = field(default_factory=dict)
    agent_successes: dict[str, list[float]] = field(default_factory=dict)
    lost: int = 0
    worker_restarts: int = 0
    steps: int = 0

    def check_steps(self, when: str = "") -> None:
        """Check that a rollout contains at least one transition.

        Raises:
            TrainingError: If every step was lost.
        """
        if self.lost and not self.steps:
            raise TrainingError(
                f"every step of a rollout was lost{when}: the environments return non-finite "
                "values or their workers fail at the beginning of each episode"
            )

    def extend(self, others: FinishedEpisodes) -> None:
        """Append later episodes, or episodes of other environments."""
        self.returns += others.returns
        self.lengths += others.lengths
        self.successes += others.successes
        add_lists(self.infos, others.infos)
        add_lists(self.agent_returns, others.agent_returns)
        add_lists(self.agent_successes, others.agent_successes)
        self.lost += others.lost
        self.worker_restarts += others.worker_restarts
        self.steps += others.steps

    def add_end(self, end: EpisodeEnd, info_keys: Sequence[str], agents: Sequence[str]) -> None:
        """Add a finished episode, with the values in its final info.

        Args:
            end: The end of the episode.
            info_keys: Requested info keys.
            agents: Names of the agents of a multi-agent environment.
        """
        numbers = numbers_of(end.info, required_keys(info_keys, agents), agents)
        self.successes.append(numbers.get(SUCCESS, math.nan))
        add_lists(self.infos, {key: [numbers[key]] for key in info_keys if key in numbers})
        for agent in agents:
            success = numbers.get(f"{agent}/{SUCCESS}", math.nan)
            self.agent_successes.setdefault(agent, []).append(success)
        add_lists(self.agent_returns, {agent: [x] for agent, x in end.agent_returns.items()})
        if end.counted is not None:
            self.returns.append(end.counted[0])
            self.lengths.append(end.counted[1])

    def record(self, statistics: Statistics, infos: ReportedInfos) -> None:
        """Record the episodes as metrics.

        Args:
            statistics: Statistics of the epoch.
            infos: Treats missing values.
        """
        events = TrainingEpisodeEvents
        if self.lost:
            statistics.record(events.lost_episodes, float(self.lost))
        if self.worker_restarts:
            statistics.record(events.worker_restarts, float(self.worker_restarts))
        if self.returns:
            for event in (
                events.episode_return_mean,
                events.episode_return_max,
                events.episode_return_min,
            ):
                statistics.record_many(event, self.returns)
            statistics.record_many(events.episode_length_mean, [float(n) for n in self.lengths])
            statistics.record(events.episodes, float(len(self.returns)))
        successes = infos.successes(self.successes)
        if successes is not None:
            statistics.record_many(events.success_rate, successes.tolist())
        for key, values in self.infos.items():
            if kept := infos.finite(key, values):
                statistics.record_many(events.info.of_part(key), kept)
        for agent, returns in self.agent_returns.items():
            statistics.record_many(events.episode_return_mean.of_owner(agent), returns)
        for agent, values in self.agent_successes.items():
            successes = infos.successes(values, agent)
            if successes is not None:
                statistics.record_many(events.success_rate.of_owner(agent), successes.tolist())


def add_lists(target: dict[str, list[float]], more: Mapping[str, Iterable[float]]) -> None:
    """Append the values of `more` to the lists with the same keys."""
    for key, values in more.items():
        target.setdefault(key, []).extend(values)


def return_of_team(team: Sequence[str], returns: Mapping[str, Sequence[float] | Array]) -> Array:
    """Return the return of a team in each episode, `[n]`: the sum over its agents.

    Args:
        team: Names of the agents of the team.
        returns: Returns of each agent, by episode.
    """
    found: Array = np.sum([np.asarray(returns[agent]) for agent in team], axis=0)
    return found


def spread(values: Sequence[float] | Array) -> tuple[float, float, float, float]:
    """Return the mean, population standard deviation, minimum and maximum; NaN if empty."""
    if not len(values):
        return (float("nan"),) * 4
    x = np.asarray(values, np.float64)
    return float(x.mean()), float(x.std()), float(x.min()), float(x.max())


class EpisodeTracker:
    """Tracks returns and lengths of the running episodes of B environments across rollouts.

    Args:
        num_envs: B.
    """

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, dtype=np.int64)

    def follow(self, rewards: Array, end: Array) -> FinishedEpisodes:
        """Process a rollout.

        Args:
            rewards: Raw rewards, `[T, B]`; 0 in rows that are not transitions.
            end: `StepEnd` codes of the steps, `[T, B]`.

        Returns:
            The finished episodes, sorted by time, then environment. Dropped episodes are excluded.
        """
        breaks = is_followed_by_new(end)
        # Segments are sorted by environment, then time. A segment starts at the first step of each
        # environment and after each break.
        starts = np.zeros((rewards.shape[1], len(rewards) + 1), np.bool_)
        starts[:, 0], starts[:, 1:] = True, breaks.T
        column = np.zeros(starts.shape, np.float64)
        column[:, :-1] = rewards.T
        begins = np.flatnonzero(starts)
        sums = np.add.reduceat(column.ravel(), begins)
        envs, times = np.divmod(begins, starts.shape[1])
        is_first = times == 0
        is_last = np.append(is_first[1:], True)
        counts = np.diff(begins, append=starts.size) - is_last
        # Segment k of an environment ends with the break before segment k + 1.
        ends = np.flatnonzero(~is_last)
        owners, moments = envs[ends], times[ends + 1] - 1
        sums[is_first] += self.returns
        counts[is_first] += self.lengths
        self.returns, self.lengths = sums[is_last], counts[is_last]
        kept = has_ended(end[moments, owners])
        order = np.argsort(moments[kept], kind="stable")
        return FinishedEpisodes(
            returns=sums[ends][kept][order].tolist(), lengths=counts[ends][kept][order].tolist()
        )

    def forget(self, envs: Array) -> None:
        """Reset returns and lengths of the environments in the mask `[B]` after lost episodes."""
        self.returns[envs] = self.lengths[envs] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the returns and lengths of the running episodes."""
        return {"returns": self.returns.copy(), "lengths": self.lengths.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.returns, self.lengths = state["returns"].copy(), state["lengths"].copy()
