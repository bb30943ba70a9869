"""Rollouts: play episodes with a policy and write the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium

from maze_train.collect.episode_pool import EpisodePool
from maze_train.collect.episodes import note_on_success
from maze_train.collect.play import PlayedEpisode
from maze_train.collect.recording import PlaySettings, ffmpeg_path
from maze_train.config.rollout_config import RolloutConfig
from maze_train.core.conversion import config_to_dict
from maze_train.core.errors import ConfigError, DatasetError, EnvError
from maze_train.core.files import atomic_write, results_directory, versions, writable
from maze_train.core.folders import check_enclosed, guarded
from maze_train.core.hub import is_on_hub
from maze_train.core.names import CONFIG, OUTPUTS, SUMMARY
from maze_train.core.notices import notify, warn
from maze_train.core.plain_yaml import dump_yaml
from maze_train.core.report import field_lines
from maze_train.core.run_directory import RunDirectory
from maze_train.core.signals import Interruption
from maze_train.data.trajectories import DatasetMetadata
from maze_train.data.trajectory_files import TrajectoryWriter
from maze_train.envs.building import close_all, close_quietly
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import BoundedEnvFactory, EnvFactory, env_name, guard_note
from maze_train.envs.wrappers import metadata_of
from maze_train.learner.modules import torch_threads
from maze_train.run.policies import RolloutPolicy, chosen_policy, with_policies
from maze_train.run.rollout_report import (
    EPISODES_FILE,
    RolloutFiles,
    RolloutProgress,
    RolloutSummary,
    summarise,
)
from maze_train.spaces.agents import agents_of, teams_in

ROLLOUT_FILE = "rollout.yaml"
TRAJECTORIES, VIDEOS = "trajectories", "videos"
FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "error"


@dataclass(frozen=True)
class RolloutResult:
    """Result of a rollout."""

    output_dir: Path
    """Directory of the results."""

    episodes: list[PlayedEpisode] = field(repr=False)
    """Episodes in order, without trajectories (see `record`)."""

    summary: RolloutSummary
    """Statistics over the episodes."""


@dataclass(frozen=True)
class Match:
    """A policy and its environment."""

    policy: RolloutPolicy
    spaces: tuple[Any, Any]
    """Observation and action space of the environment."""

    teams: Sequence[Sequence[str]]
    """Agents of each team in multi-agent environments."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents in multi-agent environments."""
        return agents_of(self.spaces)

    def summary(self, episodes: Sequence[PlayedEpisode]) -> RolloutSummary:
        """Compute statistics over episodes."""
        return summarise(episodes, self.policy.owners, self.teams)


class RolloutRunner:
    """Plays episodes with a policy and writes the results.

    Each episode depends only on the policy and its seed, not on the runner or the number of
    processes or environments.

    Args:
        config: The configuration; not modified.

    Raises:
        ConfigError: If parts of the configuration are incompatible.
        RunDirectoryError: If the policy of the run is missing or damaged.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.policy = chosen_policy(config)
        if config.env is None:
            config = replace(config, env=self.policy.env)
        assert config.env is not None  # Checked by `__post_init__` of the configuration.
        self.config = config
        self.env_config = rendered(config.env, config.render_mode)
        factory = EnvFactory(self.env_config).for_evaluation()
        self.env_factory: Callable[[], gymnasium.Env[Any, Any]] = BoundedEnvFactory(
            factory, config.max_episode_steps
        )
        self._outputs = Path(OUTPUTS).absolute()  # An environment may change the directory.

    def run(self) -> RolloutResult:
        """Play all episodes.

        Finished episodes are written even after an error or a signal.

        Raises:
            ConfigError: If policy, environment and settings do not match. Raised before anything is
                written.
            Interrupted: If SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 was received.
            MazeTrainError: If an environment, a policy or a worker failed.
            RunDirectoryError: If the results cannot be written.
        """
        config = self.config
        with (
            torch_threads(config.runner.torch_threads),
            Interruption() as interruption,
            ExitStack() as stack,
        ):
            match = self._match()
            output_dir, writer = stack.enter_context(self._new_output_dir()), None
            pool = self._pool(output_dir / VIDEOS)
            stack.callback(close_quietly, pool)
            pool.set_policy(match.policy.make_rows, "policy")
            if config.record_dir is not None:
                writer = self._trajectory_writer(match, Path(config.record_dir))
            stack.enter_context(guarded(output_dir, output_dir))
            self._write_config(output_dir)
            if config.record and writer is None:
                writer = self._trajectory_writer(match, output_dir / TRAJECTORIES)
            episodes = self._play(match, pool, output_dir, writer, interruption)
        return RolloutResult(output_dir, episodes, match.summary(episodes))

    def _play(
        self,
        match: Match,
        pool: EpisodePool,
        output_dir: Path,
        writer: TrajectoryWriter | None,
        interruption: Interruption,
    ) -> list[PlayedEpisode]:
        """Play and return the episodes; write the results even after an error or a signal."""
        seeds, episodes = self.config.episode_seeds, list[PlayedEpisode]()
        reason, began = FAILED, time.monotonic()
        progress = RolloutProgress(len(seeds), self.config.progress)
        files = RolloutFiles(output_dir, match.agents)
        with interruption.deferred():  # A signal must not interrupt writing.
            try:
                with writer or nullcontext():
                    try:
                        with interruption.immediate(), progress:
                            progress.say([self._title(match.policy)])
                            for episode in pool.play(seeds, on_step=progress.steps):
                                with interruption.deferred():
                                    _keep(episode, episodes, writer)
                                    files.add(episode)
                                interruption.check()
                                progress.ended(episode)
                    finally:
                        # Finished episodes that follow unfinished ones.
                        kept = {episode.number for episode in episodes}
                        for number in sorted(pool.waiting.keys() - kept):
                            _keep(pool.waiting[number], episodes, writer)
                reason = FINISHED
            except KeyboardInterrupt:
                reason = INTERRUPTED
                raise
            finally:
                content = {
                    "stop_reason": reason,
                    **self._content(match, episodes),
                    "wall_time_s": time.monotonic() - began,
                    "worker_restarts": pool.worker_restarts,
                    "versions": dict(versions()),
                }
                files.finish(episodes, content)
                if reason != FINISHED:
                    count = f"{len(episodes):,} of {len(seeds):,} episodes"
                    notify(f"stopped after {count}; results: {output_dir}")
        progress.say(self._outcome(match.summary(episodes), output_dir))
        if told := note_on_success([episode.success for episode in episodes]):
            notify(told)
        lengths = [episode.length for episode in episodes]
        if self.config.max_episode_steps is None and (
            note := guard_note(lengths, "max_episode_steps")
        ):
            notify(note)
        return episodes

    def _pool(self, video_dir: Path) -> EpisodePool:
        """Build the environments and workers that play the episodes."""
        config = self.config
        settings = PlaySettings(
            record=config.record,
            video_dir=str(video_dir) if config.video else None,
            video_every=config.video_interval,
        )
        return EpisodePool(
            self.env_factory,
            settings,
            config.runner.make_backend(),
            num_envs=min(config.runner.concurrency, len(config.episode_seeds)),
            on_non_finite=config.on_non_finite,
        )

    def _match(self) -> Match:
        """Build an environment and check its spaces and render modes."""
        config, mode = self.config, self.config.render_mode
        setting = ("video", True) if config.video else ("render", config.render)
        if config.video:
            ffmpeg_path()
        try:
            env = self.env_factory()
        except ConfigError as error:
            if mode is None or error.key != "env.kwargs":
                raise
            problem = f"requires an environment with render_mode={mode!r}: {error.problem}"
            raise ConfigError(setting[0], problem, setting[1]) from error
        try:
            if mode is not None and env.render_mode != mode:
                has = f"{env_name(self.env_config)} has {metadata_of(env).get('render_modes')}"
                problem = f"needs the render mode {mode!r}; {has}"
                raise ConfigError(setting[0], problem, setting[1])
            policy, spaces = self.policy, (env.observation_space, env.action_space)
            if config.policies:
                policy = with_policies(policy, config, spaces)
            else:
                policy.check_spaces(env_name(self.env_config), spaces)
            agents = agents_of(spaces)
            return Match(policy, spaces, teams_in(env.metadata, agents) if agents else ())
        finally:
            try:
                close_all([env])
            except EnvError as error:  # No episodes are played in this environment.
                warn(str(error))

    def _new_output_dir(self) -> AbstractContextManager[Path]:
        """Create the results directory; see `results_directory`."""
        given = self.config.output_dir
        taken = [CONFIG, ROLLOUT_FILE, EPISODES_FILE, SUMMARY, VIDEOS]
        if self.config.record_dir is None:
            taken.append(TRAJECTORIES)
        with writable("output_dir", Path(given or ".")):  # The name may be too long.
            found = [name for name in taken if given and (Path(given) / name).exists()]
        if found:
            problem = f"already contains results ({found[0]}); use another directory, or null"
            raise ConfigError("output_dir", problem, given)
        parent = self._default_parent() if given is None else Path()
        return results_directory("output_dir", given, parent)

    def _default_parent(self) -> Path:
        """Return the default parent of the results directory."""
        if self.policy.run_dir is not None and not is_on_hub(self.config.run or ""):
            check_enclosed(self.policy.run_dir)
            return RunDirectory(self.policy.run_dir).rollouts
        return self._outputs / f"{env_name(self.env_config)}-{self.policy.name}-rollout"

    def _write_config(self, output_dir: Path) -> None:
        """Write the configuration with which the rollout can be repeated."""
        config = replace(self.config, output_dir=None)
        text = dump_yaml(config_to_dict(config))
        with writable("output_dir", output_dir), atomic_write(output_dir / ROLLOUT_FILE) as file:
            file.write(text.encode())

    def _trajectory_writer(self, match: Match, directory: Path) -> TrajectoryWriter:
        """Open the dataset for the episodes: a new one or `record_dir`.

        Raises:
            ConfigError: If the dataset in `record_dir` has different spaces, is damaged, or cannot
                be written.
        """
        env, policy = self._env_settings, match.policy.settings
        try:
            return TrajectoryWriter(directory, DatasetMetadata(*match.spaces, env, policy))
        except DatasetError as error:
            if self.config.record_dir is None:
                raise
            raise ConfigError("record_dir", str(error), self.config.record_dir) from error

    def _content(self, match: Match, episodes: Sequence[PlayedEpisode]) -> dict[str, Any]:
        """Return the part of the summary that does not depend on the machine."""
        seeds = self.config.episode_seeds
        named = {"first_seed": seeds[0], "last_seed": seeds[-1]}
        return {
            "episodes_requested": len(seeds),
            **match.summary(episodes).as_dict(),
            **({"seeds": seeds} if self.config.seeds is not None else named),
            "deterministic": match.policy.deterministic,
            "env": self._env_settings,
            "policy": match.policy.settings,
        }

    @property
    def _env_settings(self) -> dict[str, Any]:
        assert self.config.env is not None
        return config_to_dict(self.config.env)

    def _title(self, policy: RolloutPolicy) -> str:
        count = len(self.config.episode_seeds)
        episodes = f"{count:,} episode{'s' if count > 1 else ''}"
        return f"{policy.title} on {env_name(self.env_config)}, {episodes}"

    def _outcome(self, summary: RolloutSummary, output_dir: Path) -> list[str]:
        """Return the closing lines: statistics and paths of the files."""
        lines = ["", *(f"  {line}" for line in summary.lines()), ""]
        if summary.agents:
            lines += [*(f"  {line}" for line in summary.agent_lines()), ""]
        rows = []
        if summary.lost:
            rows.append(("lost", f"{summary.lost:,} episodes (non-finite values)"))
        rows.append(("results", str(output_dir)))
        if self.config.record:
            rows.append(("dataset", str(self.config.record_dir or output_dir / TRAJECTORIES)))
        if self.config.video:
            rows.append(("videos", str(output_dir / VIDEOS)))
        return lines + field_lines(rows)


def _keep(
    episode: PlayedEpisode, episodes: list[PlayedEpisode], writer: TrajectoryWriter | None
) -> None:
    """Add an episode without its trajectory, which is passed to the writer."""
    # Write first: if writing fails, the writer keeps the episode, so it must not be added again.
    episodes.append(replace(episode, trajectory=None))
    if writer is not None and episode.trajectory is not None:
        writer.add(episode.trajectory)


def rendered(env: EnvConfig, mode: str | None) -> EnvConfig:
    """Return the settings of the environment with a render mode.

    Raises:
        ConfigError: If the settings request a different render mode.
    """
    if mode is None:
        return env
    given = env.kwargs.get("render_mode", mode)
    if given != mode:
        problem = f"expected {mode!r} for the requested video or window, or no render mode"
        raise ConfigError("env.kwargs.render_mode", problem, given)
    return replace(env, kwargs={**env.kwargs, "render_mode": mode})
