"""Report of a rollout: statistics over its episodes, files, and progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from maze_train.collect.episodes import return_of_team, spread
from maze_train.collect.play import PlayedEpisode
from maze_train.core.errors import RunDirectoryError
from maze_train.core.names import SUMMARY
from maze_train.core.report import text_table
from maze_train.core.step_end import TERMINATED, TRUNCATED
from maze_train.core.text import compact, duration, readable
from maze_train.tracking.console import Display, ProgressMode
from maze_train.tracking.tracker import CSVWriter, JSONSummaryWriter, RunInfo

EPISODES_FILE = "evaluation.csv"
COLUMNS = ("number", "seed", "return", "length", "success", "terminated", "truncated", "lost")


@dataclass(frozen=True)
class RolloutSummary:
    """Statistics over the episodes of a rollout; NaN if missing.

    Aborted episodes are included only in `episodes`, `lost` and `env_steps`. Each std is a
    population standard deviation (divided by n).
    """

    episodes: int
    """Number of played episodes, including aborted episodes."""

    lost: int
    """Number of episodes that were aborted because the environment returned non-finite values."""

    env_steps: int
    """Total number of steps."""

    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float
    length_std: float
    length_min: float
    length_max: float

    success_rate: float
    """Fraction of episodes that report success. Episodes without `is_success` count as failures,
    unless no episode reports it."""

    agents: dict[str, AgentSummary] = field(default_factory=dict)
    """Statistics of each agent in multi-agent environments."""

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics, keyed by name."""
        found = asdict(self)
        if not self.agents:
            del found["agents"]
        return found

    def lines(self) -> list[str]:
        """Format the statistics as a table."""
        values, parts = self.as_dict(), ("mean", "std", "min", "max")
        rows = [
            {"": name, **{part: readable(values[f"{name}_{part}"]) for part in parts}}
            for name in ("return", "length")
        ]
        if math.isfinite(self.success_rate):
            rows.append({"": "success", "mean": readable(self.success_rate)})
        return text_table(rows)

    def agent_lines(self) -> list[str]:
        """Format the statistics of agents as a table; empty for a single agent."""
        rows = []
        for agent, own in self.agents.items():
            named = {"agent": agent, "policy": own.policy or "-"}
            values = {"return": own.return_mean, "std": own.return_std, "turns": own.turns_mean}
            if not all(math.isnan(each.win_rate) for each in self.agents.values()):
                values |= {"win": own.win_rate, "draw": own.draw_rate, "loss": own.loss_rate}
            rows.append(named | {name: readable(value) for name, value in values.items()})
        return text_table(rows)


@dataclass(frozen=True)
class AgentSummary:
    """Statistics of an agent over the episodes of a multi-agent rollout."""

    policy: str | None
    """ID of the policy of the agent; None if the policies are not distinguished."""

    return_mean: float
    return_std: float
    return_min: float
    return_max: float

    turns_mean: float
    """Mean number of actions per episode."""

    win_rate: float
    """Fraction of episodes in which the team of the agent has a larger return (sum over its agents)
    than every team with a different policy; NaN if there is no such team. In environments without
    teams, each agent is a team."""

    draw_rate: float
    """Fraction of episodes in which the return of the team equals the largest return of a team with
    a different policy; NaN if there is no such team."""

    loss_rate: float
    """Fraction of episodes in which the return of the team is smaller than the largest return of a
    team with a different policy; NaN if there is no such team."""


def summarise(
    episodes: Iterable[PlayedEpisode],
    owners: Mapping[str, str] = MappingProxyType({}),
    teams: Sequence[Sequence[str]] = (),
) -> RolloutSummary:
    """Compute statistics over episodes.

    Args:
        episodes: The episodes.
        owners: Policy ID of each agent, if known.
        teams: Agents of each team in multi-agent environments.
    """
    episodes = list(episodes)
    whole = [episode for episode in episodes if not episode.lost]
    successes = np.array([episode.success for episode in whole])
    return RolloutSummary(
        len(episodes),
        len(episodes) - len(whole),
        sum(episode.length for episode in episodes),
        *spread([episode.episode_return for episode in whole]),
        *spread([float(episode.length) for episode in whole]),
        math.nan if np.isnan(successes).all() else float(np.nan_to_num(successes).mean()),
        _summaries_of_agents(whole, owners, teams),
    )


def _summaries_of_agents(
    episodes: Sequence[PlayedEpisode], owners: Mapping[str, str], teams: Sequence[Sequence[str]]
) -> dict[str, AgentSummary]:
    agents = episodes[0].agent_returns if episodes else {}
    returns = {a: np.array([episode.agent_returns[a] for episode in episodes]) for a in agents}
    totals = {tuple(team): return_of_team(team, returns) for team in teams or zip(agents)}
    found: dict[str, AgentSummary] = {}
    for agent in agents:
        policy = owners.get(agent)
        own = next(total for team, total in totals.items() if agent in team)
        others = [
            total
            for team, total in totals.items()
            if agent not in team and any(owners.get(a) != policy for a in team)
        ]
        best = np.max(others, axis=0) if others else np.full(len(own), math.nan)
        rates = (own > best, own == best, own < best)
        found[agent] = AgentSummary(
            policy,
            *spread(returns[agent]),
            float(np.mean([episode.agent_turns[agent] for episode in episodes])),
            *(float(rate.mean()) if others else math.nan for rate in rates),
        )
    return found


class RolloutFiles:
    """Writes the table of episodes and the summary.

    Each row is written immediately, so written rows are kept if the process is killed.

    Args:
        directory: Directory of the results.
        agents: Names of the agents in multi-agent environments.

    Raises:
        RunDirectoryError: If writing fails.
    """

    def __init__(self, directory: Path, agents: Sequence[str] = ()) -> None:
        self._directory = directory
        self._run = RunInfo(run_dir=directory)
        of_agents = [f"{name}/{agent}" for agent in agents for name in ("return", "turns")]
        self._table = CSVWriter(EPISODES_FILE, (*COLUMNS, *of_agents))
        self._count = 0
        with self._writing():
            self._table.start(self._run)
            self._table.sync()

    def add(self, episode: PlayedEpisode) -> None:
        """Write the row of an episode; flags are 0 or 1, and empty if unknown.

        Raises:
            RunDirectoryError: If writing fails. `finish` retries.
        """
        row = {
            "number": episode.number,
            "seed": episode.seed,
            "return": float(episode.episode_return),
            "length": episode.length,
            "terminated": int(episode.end == TERMINATED),
            "truncated": int(episode.end == TRUNCATED),
            "lost": int(episode.lost),
        }
        row |= {f"return/{agent}": value for agent, value in episode.agent_returns.items()}
        row |= {f"turns/{agent}": turns for agent, turns in episode.agent_turns.items()}
        if not math.isnan(episode.success):
            row["success"] = float(episode.success)
        self._count += 1
        with self._writing():
            self._table.write(row)

    def finish(self, episodes: Sequence[PlayedEpisode], content: Mapping[str, Any]) -> None:
        """Write missing rows and the summary; NaN becomes null.

        Args:
            episodes: All episodes, starting with the episodes that were already added.
            content: Contents of the summary.

        Raises:
            RunDirectoryError: If writing fails.
        """
        summary = JSONSummaryWriter(SUMMARY)
        summary.start(self._run)
        with self._writing(), closing(self._table):
            for episode in episodes[self._count :]:
                self.add(episode)
            self._table.finish(content)
            summary.finish(content)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert OSError to RunDirectoryError."""
        try:
            yield
        except OSError as error:
            problem = f"{self._directory} cannot be written: {error}"
            raise RunDirectoryError(problem) from error


class RolloutProgress:
    """Progress display of a rollout; a context manager that restores the terminal.

    If standard output is closed, the rollout continues without a display.

    Args:
        total: Episodes to play.
        mode: See `Display`.
        clock: Time in seconds, with an arbitrary origin.
    """

    def __init__(
        self,
        total: int,
        mode: ProgressMode = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display = Display(mode)
        self._total = total
        self._clock = clock
        self._started_at = clock()
        self._played = 0
        self._steps = 0
        self._counted = 0
        self._sum_of_returns = 0.0

    def __enter__(self) -> RolloutProgress:
        self._display.open(self._started_at)
        return self

    def __exit__(self, *error: object) -> None:
        with self._shown():
            if self._display.has_bar:
                self._show(self._clock())
        with self._shown():
            self._display.close()

    def say(self, lines: Iterable[str]) -> None:
        """Print lines; does nothing in quiet mode."""
        with self._shown():
            for line in lines:
                self._display.say(line)

    def steps(self, count: int) -> None:
        """Count environment steps."""
        self._steps += count
        self._show_if_due()

    def ended(self, episode: PlayedEpisode) -> None:
        """Count a finished episode."""
        self._played += 1
        if not episode.lost:
            self._counted += 1
            self._sum_of_returns += episode.episode_return
        self._show_if_due()

    def _show_if_due(self) -> None:
        now = self._clock()
        if self._display.is_due(now):
            with self._shown():
                self._show(now)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._display.silence()

    def _show(self, now: float) -> None:
        elapsed = now - self._started_at
        parts = [f"{compact(self._steps):>5} steps"]
        if elapsed > 0:
            parts.append(f"{compact(self._steps / elapsed):>5}/s")
        if self._played:
            left = elapsed * (self._total - self._played) / self._played
            parts.append(f"eta {duration(left)}")
        if self._counted:
            parts.append(f"return {readable(self._sum_of_returns / self._counted)}")
        played = f"episode {self._played:>{len(str(self._total))}}/{self._total}"
        self._display.show(now, played, self._played / self._total, "  ".join(parts))
