"""The configuration of a rollout: episodes that a policy plays, without learning."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from maze_train.config.loading import load_settings, named, nested_values
from maze_train.config.stored import PARTS_OF_ENV, PARTS_OF_POLICY, read_settings
from maze_train.config.train_config import CHOOSE_ENV, DevRunnerConfig, RunnerConfig
from maze_train.core.checks import absolute_path, check_at_least, check_fields
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.hub import at_commit, is_on_hub
from maze_train.core.policy_place import PolicyPlace
from maze_train.core.targets import TARGET, is_target
from maze_train.envs.config import EnvConfig
from maze_train.training.config import RANDOM, PolicyConfig

DEFAULT_CONCURRENCY = 8


ONLY_FOR_TRAINING = (
    *("max_wall_time_s", "dataset", "fast_dev_run"),
    *("deterministic", "detect_anomaly", "envs_per_actor"),
)
"""Settings of a runner that a rollout does not have."""


@dataclass(kw_only=True)
class RolloutConfig(Settings):
    """Everything that defines a rollout: a policy, an environment, and the episodes to play."""

    run: str | None = None
    """Directory of a training run, whose best policy plays, or of one of its saved policies
    (<run>/policies/epoch_<n>), <run>@final or <run>@epoch_<n>, or hf://<owner>/<name> of one on the
    Hugging Face hub."""

    policy: str | dict[str, Any] | None = None
    """Instead of `run`: `random`, or `{_target_: dotted path, key: value}` of a class or function
    that returns a policy of your own."""

    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    """Policies of single agents, where there are several: `{first: <run>, second: random}`, or with
    `agents` and `source` as in training; agents that are not named play as `run` or `policy` says.
    """

    env: EnvConfig | None = None
    """The environment; null: that of the run. With `run`, settings given here change that one."""

    runner: RunnerConfig = field(default_factory=DevRunnerConfig)
    """Place of the episodes: `runner=dev` in this process, `runner=local` in several.
    Settings for training, such as `max_wall_time_s`, are refused here."""

    n_episodes: int = 50
    """Episodes to play, >= 1."""

    seed: int = 0
    """Seed of episode 0, >= 0; that of episode j is `seed + j`."""

    seeds: list[int] | None = None
    """Seeds of the episodes, one each, >= 0, in place of `n_episodes` and `seed`."""

    deterministic: bool = True
    """Whether a trained policy takes its most likely action; otherwise actions are sampled."""

    max_episode_steps: int | None = None
    """Steps after which an episode is truncated and counts as far as it came, >= 0; a smaller limit
    of the environment remains in force. null: the limit of the environment, or 30,000 if it
    declares none; 0: no limit but that of the environment."""

    record: bool = False
    """Whether the episodes are written as a data set, to <output>/trajectories."""

    record_dir: str | None = None
    """With `record`: directory of another data set, to which the episodes are appended."""

    video: bool = False
    """Whether videos are written, to <output>/videos (extra `video`)."""

    video_interval: int = 1
    """With `video`: every k-th episode is filmed, beginning with number 0. >= 1."""

    render: Literal["none", "human"] = "none"
    """`human`: show a window; for `runner=dev` with one environment."""

    on_non_finite: Literal["raise", "skip"] = "raise"
    """Reaction to NaN and infinities of the environment: raise: the rollout ends; skip: the episode
    ends, and is counted as lost."""

    progress: Literal["auto", "bar", "lines", "quiet"] = "auto"
    """Display of progress: a bar, lines, or nothing (quiet); auto: a bar on a terminal, else lines
    (at most one a second)."""

    output_dir: str | None = None
    """Directory of the results; null: <run>/rollouts/<date>_<time>, without a run
    outputs/<env>-<policy>-rollout/<date>_<time>."""

    trust: list[str] = field(default_factory=list)
    """Modules other than this package, PyTorch and gymnasium that the configuration of `run` may
    import if another user made the run, such as `[my_envs, my_nets]`: their code is run."""

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
        """Render mode of the environments; None: nothing is rendered."""
        if self.video:
            return "rgb_array"
        return "human" if self.render == "human" else None

    def _check_policy(self) -> None:
        named = [name for name in ("run", "policy") if getattr(self, name) is not None]
        if len(named) > 1 or not (named or self.policies):
            raise ConfigError(
                "run",
                "expected one of run=<directory of a run>, policy=random and "
                "policy._target_=<dotted path of your own>, or policies.<agent>=<source> of all "
                "agents where there are several",
                self.run,
            )
        if self.policy is not None and self.policy != RANDOM and not is_target(self.policy):
            problem = "expected `random`, or a mapping with the key `_target_`"
            raise ConfigError("policy", problem, self.policy)
        if self.policies and isinstance(self.policy, dict):
            problem = "acts for all agents: expected random, or null, next to policies"
            raise ConfigError("policy", problem, self.policy)
        for key, own in self.policies.items():
            self._check_one_of_several(f"policies.{key}", own)
        self._check_env()

    def _check_one_of_several(self, key: str, own: PolicyConfig) -> None:
        """Refuse a policy that comes from nowhere, and what is for training only."""
        if own.source is None:
            problem = "expected random, the directory of a run, or the key _target_"
            raise ConfigError(f"{key}.source", problem, own.source)
        for name in ("model", "frozen", "opponents"):
            if getattr(own, name):
                problem = "is for training: leave it out"
                raise ConfigError(f"{key}.{name}", problem, getattr(own, name))

    def _check_env(self) -> None:
        if self.env is None and self.run is not None:
            return
        if self.env is None or not (self.env.id or self.env.target):
            raise ConfigError("env", CHOOSE_ENV)
        if not self.env.has_single_form:
            raise ConfigError(
                "env.backend",
                "every episode of a rollout has its own seed, which only single environments "
                "take: set it to gymnasium",
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
            value = getattr(self, name)
            if name == "record_dir" and value is not None and not self.record:
                raise ConfigError(name, "needs record=true", value)
            if value is not None:
                setattr(self, name, absolute_path(name, value))

    def _check_runner(self) -> None:
        for name in ONLY_FOR_TRAINING:
            value = getattr(self.runner, name)
            if value:
                problem = "is for training: leave it out (n_episodes sets the length of a rollout)"
                raise ConfigError(f"runner.{name}", problem, value)
        if not self.runner.concurrency:
            count = 1 if self.render == "human" else DEFAULT_CONCURRENCY
            self.runner = replace(self.runner, concurrency=count)

    def _check_rendering(self) -> None:
        if self.render != "human":
            return
        if self.video:
            problem = "shows a window, and films nothing: set render=none or video=false"
            raise ConfigError("render", problem, self.render)
        if not isinstance(self.runner, DevRunnerConfig):
            problem = "shows a window of this process: set runner=dev"
            raise ConfigError("render", problem, self.render)
        if self.runner.concurrency != 1:
            problem = "one environment has the window: set runner.concurrency=1"
            raise ConfigError("render", problem, self.render)


ENV_NAMES = ("id", TARGET)
OWN_OF_ENV = (*ENV_NAMES, "kwargs", "max_episode_steps")
"""Settings that belong to one environment; the others hold for any that takes its place."""


def load_rollout_config(node: Mapping[str, Any]) -> RolloutConfig:
    """The configuration of a rollout from plain nested values.

    With `run`, settings of `env` are put over those of the run. Another environment (`id`,
    `_target_`) comes with its own `kwargs` and `max_episode_steps`; wrappers and preprocessing stay
    those of the run.

    Args:
        node: Values by the names of the fields of `RolloutConfig`, in the forms that `load_config`
            takes: `{"run": "outputs/a", "runner": "local", "env.kwargs.size": 5}`. `seeds` may be
            any iterable of integers, such as a range or an array.

    Raises:
        ConfigError: If a key is unknown, a value has a wrong type or is out of range, values
            contradict each other, there is no saved policy in the directory of the run, or that
            names what is not trusted, see `StoredSettings`.
        RunDirectoryError: If the configuration of the run is damaged.
    """
    values = nested_values(RolloutConfig, node)
    if "seeds" in values:
        values["seeds"] = plain_seeds(values["seeds"])
    if isinstance(values.get("policies"), Mapping):
        values["policies"] = sources_of(values["policies"])
    run, env = values.get("run"), values.get("env")
    if isinstance(run, (str, os.PathLike)) and values.get("policy") is None and str(run).strip():
        place = PolicyPlace.named(absolute_path("run", str(run)))
        place.check_files(str(run))
        if is_on_hub(run):
            values["run"] = at_commit(str(run), place.directory)  # the same one when read again
        stored = read_settings(place.settings)
        if "env" not in stored.values:
            problem = "expected settings of the environment"
            raise RunDirectoryError(f"{stored.path} is damaged: {problem}")
        if env is None or isinstance(env, Mapping):
            values["env"] = joined_env(stored.values["env"], env or {})
            if not any(values["env"].get(name) for name in ENV_NAMES):
                raise ConfigError("env", CHOOSE_ENV)
            settings = {**stored.values, "env": values["env"]}
            uses = (*PARTS_OF_POLICY, *PARTS_OF_ENV)
            stored.check(settings, values.get("trust"), {"env": env}, uses)
    return load_settings(RolloutConfig, values)


def sources_of(policies: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of several policies, each of which may be given by its source alone.

    A policy that names no agents is that of the agent whose name is its id.
    """
    found: dict[str, Any] = {}
    for key, own in policies.items():
        is_source = not isinstance(own, Mapping | PolicyConfig) or is_target(own)
        node = {"source": own} if is_source else own
        if isinstance(node, Mapping):
            node = named({"agents": [key], **node}, f"policies.{key}")
        found[key] = node
    return found


def plain_seeds(seeds: Any) -> Any:
    """Return seeds as a list; anything else stays, such as an array that is a single number."""
    is_text = isinstance(seeds, str | bytes | Mapping)
    if is_text or not isinstance(seeds, Iterable) or getattr(seeds, "ndim", 1) == 0:
        return seeds
    return list(seeds)


def joined_env(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the environment of a run, changed by those that are given."""
    named = {key: given.get(key) for key in ENV_NAMES}
    is_other = any(named.values()) and named != {key: stored.get(key) for key in ENV_NAMES}
    kept = {key: value for key, value in stored.items() if not (is_other and key in OWN_OF_ENV)}
    if not is_other and isinstance(given.get("kwargs"), Mapping):
        given = {**given, "kwargs": {**(stored.get("kwargs") or {}), **given["kwargs"]}}
    if not any(named.values()):
        given = {key: value for key, value in given.items() if key not in ENV_NAMES}
    return {**kept, **given}
