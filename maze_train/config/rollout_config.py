"""Settings of a rollout: episodes are run with a policy, without training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from maze_train.config.compose import compose, load_settings, named
from maze_train.config.stored import PARTS_OF_ENV, PARTS_OF_POLICY, read_settings
from maze_train.config.train_config import CHOOSE_ENV, DevRunnerConfig, RunnerConfig
from maze_train.core.checks import absolute_path, check_at_least, check_fields
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.hub import at_commit, is_on_hub
from maze_train.core.policy_location import PolicyLocation
from maze_train.core.targets import TARGET, is_target
from maze_train.envs.config import EnvConfig
from maze_train.training.config import RANDOM, PolicyConfig

DEFAULT_CONCURRENCY = 8


ONLY_FOR_TRAINING = (
    *("max_wall_time_s", "dataset", "fast_dev_run"),
    *("deterministic", "detect_anomaly", "envs_per_actor"),
)
"""Runner settings that are not allowed for rollouts."""


@dataclass(kw_only=True)
class RolloutConfig(Settings):
    """Settings of `maze-run rollout`: a policy, an environment, and the episodes to run."""

    run: str | None = None
    """Policy to evaluate: a run directory (selects the best policy), the directory of a saved
    policy (<run>/policies/epoch_<n>), <run>@final, <run>@epoch_<n>, latest (the newest run in
    outputs/), or hf://<owner>/<name> for a policy on the Hugging Face hub. On the command line,
    with a pattern such as 'runs/a/policies/*', each matching policy is evaluated and a table,
    policies.csv, is written."""

    policy: str | dict[str, Any] | None = None
    """Policy to evaluate instead of `run`: `random`, or `{_target_: dotted path, key: value}` with
    a class or function that returns a custom policy."""

    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    """Policies of individual agents in multi-agent environments: `{first: <run>, second: random}`,
    or mappings with `agents` and `source` as in training. All other agents are controlled by `run`
    or `policy`."""

    env: EnvConfig | None = None
    """The environment; null: the environment of the run. With `run`, these settings override the
    settings of the run.
    """

    runner: RunnerConfig = field(default_factory=DevRunnerConfig)
    """Runner: with `runner=dev`, episodes are run in this process; with `runner=local`, in worker
    processes. Settings for training, such as `max_wall_time_s`, are not allowed."""

    n_episodes: int = 50
    """Number of episodes to run (>= 1)."""

    seed: int = 0
    """Seed of the first episode (>= 0); episode j uses `seed + j`."""

    seeds: list[int] | None = None
    """One seed per episode (>= 0); replaces `n_episodes` and `seed`."""

    deterministic: bool = True
    """Whether a trained policy takes its most likely action. If false, actions are sampled."""

    max_episode_steps: int | None = None
    """Maximum length of an episode in steps (>= 0), in addition to the time limit of the
    environment. Truncated episodes are included in all statistics. null: 30,000 if the environment
    declares no limit; 0: no additional limit."""

    record: bool = False
    """Whether to record the episodes as a dataset in <output>/trajectories."""

    record_dir: str | None = None
    """Directory of an existing or new dataset to which the episodes are appended; requires
    `record`. null: <output>/trajectories."""

    video: bool = False
    """Whether to write videos to <output>/videos (requires the extra `video`)."""

    video_interval: int = 1
    """Number k >= 1: with `video`, every k-th episode is recorded, starting with episode 0."""

    render: Literal["none", "human"] = "none"
    """Rendering: none, or human (show the environment in a window; requires `runner=dev` and one
    environment)."""

    on_non_finite: Literal["raise", "skip"] = "raise"
    """What to do if the environment returns NaN or infinity: raise: stop with an error; skip: abort
    the episode and exclude it from the statistics."""

    progress: Literal["auto", "bar", "lines", "quiet"] = "auto"
    """Progress display: a bar, lines, or nothing (quiet); auto: a bar on a terminal, otherwise
    lines (at most one per second)."""

    output_dir: str | None = None
    """Output directory; null: <run>/rollouts/<date>_<time>, or, without a run,
    outputs/<env>-<policy>-rollout/<date>_<time>."""

    trust: list[str] = field(default_factory=list)
    """Modules other than this package, PyTorch and gymnasium that the configuration of `run` may
    import if you did not create the run, such as `[my_envs, my_nets]`. Their code is executed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_policy()
        self._check_episodes()
        self._check_places()
        self._check_runner()
        self._check_rendering()

    @property
    def episode_seeds(self) -> list[int]:
        """The seed of each episode."""
        if self.seeds is not None:
            return list(self.seeds)
        return list(range(self.seed, self.seed + self.n_episodes))

    @property
    def render_mode(self) -> str | None:
        """Render mode of the environments; None for no rendering."""
        if self.video:
            return "rgb_array"
        return "human" if self.render == "human" else None

    def _check_policy(self) -> None:
        named = [name for name in ("run", "policy") if vars(self)[name] is not None]
        if len(named) > 1 or not (named or self.policies):
            raise ConfigError(
                "run",
                "expected one of run=<directory of a run>, policy=random and "
                "policy._target_=<dotted path>, or in multi-agent environments "
                "policies.<agent>=<source> for all agents",
                self.run,
            )
        if self.policy is not None and self.policy != RANDOM and not is_target(self.policy):
            problem = "expected `random`, or a mapping with the key `_target_`"
            raise ConfigError("policy", problem, self.policy)
        if self.policies and isinstance(self.policy, dict):
            problem = "a custom policy controls all agents; with policies, use random or null"
            raise ConfigError("policy", problem, self.policy)
        for key, own in self.policies.items():
            self._check_one_of_several(f"policies.{key}", own)
        self._check_env()

    def _check_one_of_several(self, key: str, own: PolicyConfig) -> None:
        """Check that the policy of an agent has a source, and no settings for training."""
        if own.source is None:
            problem = "expected random, the directory of a run, or the key _target_"
            raise ConfigError(f"{key}.source", problem, own.source)
        for name in ("model", "frozen", "opponents"):
            if vars(own)[name]:
                problem = "only used for training; remove this setting"
                raise ConfigError(f"{key}.{name}", problem, vars(own)[name])

    def _check_env(self) -> None:
        if self.env is None and self.run is not None:
            return
        if self.env is None or not (self.env.id or self.env.target):
            raise ConfigError("env", CHOOSE_ENV)
        if not self.env.has_single_form:
            raise ConfigError(
                "env.backend",
                "rollouts seed every episode, which vector environments do not support; "
                "use gymnasium",
                self.env.backend,
            )

    def _check_episodes(self) -> None:
        check_fields(self, 0, "seed")
        if self.max_episode_steps is not None:
            check_at_least("max_episode_steps", self.max_episode_steps, 0)
        check_fields(self, 1, "n_episodes", "video_interval")
        if self.seeds is None:
            return
        if not self.seeds:
            raise ConfigError("seeds", "expected at least one seed, or null", self.seeds)
        for i, seed in enumerate(self.seeds):
            check_at_least(f"seeds[{i}]", seed, 0)

    def _check_places(self) -> None:
        for name in ("run", "output_dir", "record_dir"):
            value = vars(self)[name]
            if name == "record_dir" and value is not None and not self.record:
                raise ConfigError(name, "requires record=true", value)
            if value is not None:
                setattr(self, name, absolute_path(name, value))

    def _check_runner(self) -> None:
        for name in ONLY_FOR_TRAINING:
            value = vars(self.runner)[name]
            if value:
                problem = "only used for training; remove it (n_episodes limits a rollout)"
                raise ConfigError(f"runner.{name}", problem, value)
        if not self.runner.concurrency:
            count = 1 if self.render == "human" else DEFAULT_CONCURRENCY
            self.runner = replace(self.runner, concurrency=count)

    def _check_rendering(self) -> None:
        if self.render != "human":
            return
        if self.video:
            problem = "cannot be combined with video: set render=none or video=false"
            raise ConfigError("render", problem, self.render)
        if not isinstance(self.runner, DevRunnerConfig):
            problem = "requires environments in this process: set runner=dev"
            raise ConfigError("render", problem, self.render)
        if self.runner.concurrency != 1:
            problem = "requires a single environment: set runner.concurrency=1"
            raise ConfigError("render", problem, self.render)


ENV_NAMES = ("id", TARGET)
OWN_OF_ENV = (*ENV_NAMES, "kwargs", "max_episode_steps")
"""Settings of one environment; they are dropped if a different environment is selected."""


def load_rollout_config(node: Mapping[str, Any]) -> RolloutConfig:
    """Build the configuration of a rollout from plain nested values.

    With `run`, settings in `env` override the run's settings. If `env` selects a different
    environment (`id`, `_target_`), `kwargs` and `max_episode_steps` of the run are dropped, but the
    wrappers and preprocessing of the run are kept.

    Args:
        node: Values by field of `RolloutConfig`, in the forms that `load_config` accepts:
            `{"run": "outputs/a", "runner": "local", "env.kwargs.size": 5}`. `seeds` may be any
            iterable of integers, such as a range or an array.

    Raises:
        ConfigError: If a key is unknown, a value has the wrong type or is out of range, values
            contradict each other, the run directory contains no saved policy, or the configuration
            of the run requires untrusted code (see `StoredSettings`).
        RunDirectoryError: If the configuration of the run is damaged.
    """
    return rollout_config(compose("rollout", node).values)


def rollout_config(composed: Mapping[str, Any]) -> RolloutConfig:
    """Build the configuration of a rollout from composed values, see `load_rollout_config`."""
    values = dict(composed)
    if "seeds" in values:
        values["seeds"] = plain_seeds(values["seeds"])
    if isinstance(values.get("policies"), Mapping):
        values["policies"] = sources_of(values["policies"])
    run, env = values.get("run"), values.get("env")
    if isinstance(run, (str, os.PathLike)) and values.get("policy") is None and str(run).strip():
        place = PolicyLocation.named(absolute_path("run", str(run)))
        place.check_files(str(run))
        if is_on_hub(run):
            values["run"] = at_commit(str(run), place.directory)  # Pin the commit.
        stored = read_settings(place.settings, values.get("trust"), {"env": env})
        if "env" not in stored.values:
            problem = "expected settings of the environment"
            raise RunDirectoryError(f"{stored.path} is damaged: {problem}")
        if env is None or isinstance(env, Mapping):
            values["env"] = joined_env(stored.values["env"], env or {})
            if not any(values["env"].get(name) for name in ENV_NAMES):
                raise ConfigError("env", CHOOSE_ENV)
            settings = {**stored.values, "env": values["env"]}
            uses = (*PARTS_OF_POLICY, *PARTS_OF_ENV)
            stored.check(settings, uses)
    return load_settings(RolloutConfig, values)


def sources_of(policies: Mapping[str, Any]) -> dict[str, Any]:
    """Expand policies in short form, `{<agent>: <source>}`, to mappings.

    A policy without `agents` controls the agent with the same name.
    """
    found: dict[str, Any] = {}
    for key, own in policies.items():
        is_source = not isinstance(own, Mapping | PolicyConfig) or is_target(own)
        node = {"source": own} if is_source else own
        if isinstance(node, Mapping):
            node = named({"agents": [key], **node}, f"policies.{key}")
        found[key] = node
    return found


def plain_seeds(seeds: object) -> object:
    """Convert an iterable of seeds to a list; other values are returned unchanged.

    Wrong types are reported when the settings are built.
    """
    if isinstance(seeds, str | bytes | Mapping) or not isinstance(seeds, Iterable):
        return seeds
    try:
        return list(seeds)
    except TypeError:
        return seeds


def joined_env(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge environment settings of the user into the stored settings of a run."""
    named = {key: given.get(key) for key in ENV_NAMES}
    is_other = any(named.values()) and named != {key: stored.get(key) for key in ENV_NAMES}
    kept = {key: value for key, value in stored.items() if not (is_other and key in OWN_OF_ENV)}
    if not is_other and isinstance(given.get("kwargs"), Mapping):
        given = {**given, "kwargs": {**(stored.get("kwargs") or {}), **given["kwargs"]}}
    if not any(named.values()):
        given = {key: value for key, value in given.items() if key not in ENV_NAMES}
    return {**kept, **given}
