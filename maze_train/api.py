"""Training, acting and evaluation from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gymnasium import Env, Wrapper

from maze_train.collect.episode_pool import RolloutGenerator
from maze_train.collect.episodes import note_on_success
from maze_train.collect.recording import PlaySettings
from maze_train.config.compose import load_config, load_settings
from maze_train.config.rollout_config import load_rollout_config
from maze_train.config.stored import PARTS_OF_ENV, read_settings
from maze_train.config.train_config import TrainConfig
from maze_train.core.checks import check_at_least
from maze_train.core.hub import local_directory
from maze_train.core.notices import notify
from maze_train.core.targets import TARGET, InlineObject
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import EnvFactory
from maze_train.learner.learner import Learner
from maze_train.run.build import restored_learner
from maze_train.run.resuming import resumed_config
from maze_train.run.rollout import RolloutResult, RolloutRunner
from maze_train.run.rollout_report import RolloutSummary, summarise
from maze_train.run.saved_policies import read_saved_policy
from maze_train.training.policy_files import TrainedPolicy
from maze_train.workers.backends import refuse_import


def run_rollout(
    run: str | Path | None = None,
    policy: object = None,
    env: str | Callable[..., Env[Any, Any]] | EnvConfig | Mapping[str, Any] | None = None,
    **settings: object,
) -> RolloutResult:
    """Play episodes with a policy and write the results, like `maze-run rollout`.

        result = run_rollout(run="outputs/a", n_episodes=20, runner="local")
        result.summary.return_mean
        run_rollout(policy=lambda observation: 0, env="CartPole-v1", record=True)

    Args:
        run: Run directory (selects the best policy), or the directory of a saved policy.
        policy: Policy to evaluate if `run` is None: `"random"`; a mapping with `_target_`; a model
            or a loaded policy; an object with a method `act(observation)` (copied for every
            environment), or its class; or a function of the observation.
        env: Environment, see `train`; None for the environment of the run. With `run`, the argument
            overrides the corresponding settings of the run.
        **settings: Settings of `RolloutConfig` by name: `n_episodes=20`, `seed=100`,
            `runner="local"`; single values by dotted names: `**{"env.kwargs.size": 5}`.

    Returns:
        Output directory, episodes and summary statistics.

    Raises:
        ConfigError: If a setting is invalid, or policy and environment do not match. Raised before
            anything is written.
        Interrupted: If SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 was received. Finished
            episodes are written.
        MazeTrainError: If an environment, a policy or a worker fails. Finished episodes are
            written.
    """
    refuse_import()
    if policy is not None and not isinstance(policy, str | Mapping):
        policy = {TARGET: InlineObject(policy)}
    if isinstance(env, EnvFactory) or callable(env):
        env = {TARGET: EnvFactory.from_any(env).config.target}
    given = {"run": run, "policy": policy, "env": env}
    given = {key: value for key, value in given.items() if value is not None}
    return RolloutRunner(load_rollout_config({**given, **settings})).run()


def load_learner(
    run_dir: str | Path,
    trust: Sequence[str] = (),
    env: Callable[..., Env[Any, Any]] | None = None,
    **changes: object,
) -> Learner[Any, Any, Any]:
    """Load the learner of a run from a checkpoint: networks, optimizers, and trained module ids.

    The learner is built from the configuration of the run. Environments are created temporarily in
    this process to read their spaces.

    Args:
        run_dir: Run directory (selects the newest checkpoint), or the directory of a checkpoint.
        trust: Modules that the configuration may import if you did not create the run. Their code
            is executed.
        env: Environment of the run; required if it is a function or class that cannot be imported.
        **changes: Changes of settings that do not affect results, such as
            `**{"algorithm.device": "cpu"}`.

    Raises:
        ConfigError: If the configuration requires an untrusted module (any module except this
            package and PyTorch).
        RunDirectoryError: If there is no checkpoint, or a file is damaged.
    """
    refuse_import()
    own = {} if env is None else {"env._target_": EnvFactory.from_any(env).config.target}
    changes = {"runner": "dev", "trust": list(trust), **changes, **own, "resume": str(run_dir)}
    return restored_learner(resumed_config(str(run_dir), changes))


def load_policy(run_dir: str | Path, trust: Sequence[str] = (), **objects: object) -> TrainedPolicy:
    """Load the best policy of a run.

    Args:
        run_dir: Run directory, or the directory of a saved policy
            (`<run dir>/policies/epoch_<n>`). `<run dir>@final` and `<run dir>@epoch_<n>` select the
            policy of a checkpoint, `hf://<owner>/<name>[@<revision>]` a policy on the Hugging Face
            hub.
        trust: Modules that the configuration may import for networks if you did not create the run.
            Their code is executed.
        **objects: Components of the policy that cannot be imported by name, by setting:
            `**{"model.policy": MyNet}`.

    Raises:
        ConfigError: If the configuration requires an untrusted module (any module except this
            package and `torch.nn`).
        RunDirectoryError: If there is no saved policy, or a file is damaged.
    """
    saved = read_saved_policy(run_dir, trust, objects=objects)
    return TrainedPolicy(
        saved.make_model(), *saved.spaces, settings=saved.text, missing=saved.missing
    )


def make_env(
    run_dir: str | Path, trust: Sequence[str] = (), training: bool = False, **kwargs: object
) -> Env[Any, Any]:
    """Create an environment of a run, with its wrappers.

        env = make_env("outputs/a", render_mode="human")

    Args:
        run_dir: Run directory, or the directory of a saved policy.
        trust: Modules that the configuration may import for environment and wrappers if you did not
            create the run. Their code is executed.
        training: Whether to also apply the training wrappers (`env.training_wrappers`).
        **kwargs: Arguments of the environment, which override the arguments in the configuration.

    Raises:
        ConfigError: If the configuration requires an untrusted module (any module except this
            package and gymnasium), or an object that cannot be imported by name.
        EnvError: If the environment cannot be built.
        RunDirectoryError: If the configuration is missing or damaged.
    """
    stored = read_settings(local_directory(run_dir), trust)
    stored.check(stored.values, (*PARTS_OF_ENV, "env.training_wrappers"))
    factory = EnvFactory.from_any(load_settings(TrainConfig, stored.values).env, **kwargs)
    return (factory if training else factory.for_evaluation())()


class _KeptOpen(Wrapper[Any, Any, Any, Any]):
    """Environment of the caller, which `close` leaves open."""

    def close(self) -> None:
        """Leave the environment open."""


def evaluate(
    policy: object,
    env: str | Callable[..., Env[Any, Any]] | EnvConfig | Mapping[str, Any] | Env[Any, Any],
    n_episodes: int = 10,
    seed: int = 0,
    *,
    deterministic: bool = True,
    max_episode_steps: int | None = None,
    concurrency: int = 8,
) -> RolloutSummary:
    """Play episodes with a policy and return summary statistics, without writing any files.

        evaluate(load_policy("outputs/a"), "CartPole-v1", n_episodes=100).return_mean

    Args:
        policy: Policy, see `run_rollout`: a loaded policy, an object with `act(observation)`, a
            function of the observation, or `"random"`.
        env: A registered id, an `EnvConfig`, the `env` section as a mapping, or a class or function
            that creates an environment, such as `lambda: make_env("outputs/a")`. An environment
            object plays one episode at a time, and stays open.
        n_episodes: Number of episodes, >= 1.
        seed: Seed of the first episode; episode j uses `seed + j`.
        deterministic: Whether a model takes the most likely action instead of a sampled one.
        max_episode_steps: Maximum length of an episode in steps; longer episodes are truncated.
            None: the limit of the environment.
        concurrency: Number of parallel episodes; does not affect the results.

    Raises:
        ConfigError: If an argument is invalid, or policy and environment do not match.
        EnvError: If the environment or the policy raises an error or returns an invalid value.
    """
    check_at_least("n_episodes", n_episodes, 1)
    if isinstance(env, Mapping):
        env = load_config({"env": env, "algorithm": "ppo"}).env
    if isinstance(env, Env):
        notify(
            "note: an environment object plays one episode at a time; to play several at once, "
            "pass a class or function that creates it"
        )
        env, concurrency = partial(_KeptOpen, env), 1
    with RolloutGenerator(
        env,
        policy,
        deterministic=deterministic,
        concurrency=min(concurrency, n_episodes),
        seed=seed,
        max_episode_steps=max_episode_steps,
        settings=PlaySettings(),
    ) as player:
        episodes = list(player.play(range(seed, seed + n_episodes)))
    if note := note_on_success([episode.success for episode in episodes]):
        notify(note)
    return summarise(episodes)
