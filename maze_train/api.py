"""Training and acting from Python."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from maze_train.config.pipeline import configure, prepare
from maze_train.config.rollout_loading import load_rollout_config
from maze_train.config.train_config import AUTO
from maze_train.config.writing import key_of_field
from maze_train.envs.factory import EnvFactory
from maze_train.runners.base import TrainingRunner
from maze_train.runners.rollout import RolloutResult, RolloutRunner
from maze_train.runners.saved_policies import read_saved_policy
from maze_train.targets import TARGET
from maze_train.training.policy_files import TrainedPolicy
from maze_train.workers.process import refuse_import

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gymnasium import Env

    from maze_train.envs.config import EnvConfig
    from maze_train.runners.parts import TrainingResult


def train(
    env: str | Callable[..., Env[Any, Any]] | EnvConfig | dict[str, Any] | None = None,
    algorithm: str | dict[str, Any] | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train a policy, or go on training one.

        result = train(env="CartPole-v1", algorithm="ppo", total_steps=50_000)
        action = result.policy.act(observation)
        result = train(resume=result.run_dir, total_steps=100_000)

    Args:
        env: A registered id, an environment class, a function that makes an environment, or the
            settings of the `env` section as a mapping or an `EnvConfig`. None: there is none, for
            algorithms that learn from recorded episodes.
        algorithm: The name of an algorithm (by default ppo), or its settings as a mapping with
            `_target_`.
        **overrides: Settings by top-level name: `total_steps=50_000`, `seed=1`, `runner="local"`,
            or sections, `evaluation={"n_episodes": 20}`; single values by dotted names as on the
            command line: `**{"algorithm.lr": 1e-3}`. With `resume=<run directory>` and no
            `algorithm`, they change the settings of that run; `env` is then needed only if it was a
            function or class that has no importable name.

    Returns:
        History, run directory, and the best policy.

    Raises:
        ConfigError: If a setting is wrong; nothing has been written then.
        Interrupted: After SIGINT, SIGTERM, SIGHUP or SIGUSR1; a checkpoint was saved.
        MazeTrainError: If training failed.
    """
    refuse_import()
    maker = None
    if (
        algorithm is None
        and overrides.get("resume") not in (None, AUTO)
        and (env is None or callable(env))
    ):
        maker = None if env is None else EnvFactory.from_any(env).maker
        config = configure(overrides, changes=overrides, has_env=env is not None)
    else:
        if env is not None and not isinstance(env, str | dict):
            named = EnvFactory.from_any(env)
            # A mapping, so that overrides of single values can be merged into it.
            env = {key_of_field(key): value for key, value in asdict(named.config).items()}
            maker = named.maker
        given = {} if env is None else {"env": env}  # recorded episodes need none
        config = configure({**given, "algorithm": algorithm or "ppo", **overrides})
    factory = None if maker is None else EnvFactory(config.env, maker)
    return TrainingRunner(prepare(config), factory).run()


def run_rollout(
    run: str | Path | None = None,
    policy: Any = None,
    env: str | Callable[..., Env[Any, Any]] | EnvConfig | dict[str, Any] | None = None,
    **settings: Any,
) -> RolloutResult:
    """Play episodes with a policy, and write the results: `maze-run -cn rollout`.

        result = run_rollout(run="outputs/a", n_episodes=20, runner="local")
        result.summary.return_mean
        run_rollout(policy=lambda observation: 0, env="CartPole-v1", record=True)

    Args:
        run: Directory of a training run, whose best policy plays, or of a saved policy.
        policy: Instead of `run`: `"random"`; a mapping with `_target_`; a model, or a policy that
            was loaded; an object with a method `act(observation)`, of which every environment gets
            a copy; a class of such objects; or a function of the observation.
        env: As in `train`; None: the environment of the run. With `run`, a mapping, an id, and a
            class or function change what they name, and the other settings stay those of the run.
        **settings: Settings of `RolloutConfig` by name: `n_episodes=20`, `seed=100`,
            `runner="local"`; single values by dotted names: `**{"env.kwargs.size": 5}`.

    Returns:
        Directory of the results, the episodes, and numbers over them.

    Raises:
        ConfigError: If a setting is wrong, or policy and environment do not fit; nothing has been
            written then.
        Interrupted: After SIGINT, SIGTERM, SIGHUP or SIGUSR1; what was played was written.
        MazeTrainError: If an environment, a policy or a worker failed; as before.
    """
    refuse_import()
    own_policy = None
    if policy is not None and not isinstance(policy, str | dict):
        own_policy, named = policy, policy if hasattr(policy, "__qualname__") else type(policy)
        policy = {TARGET: f"{named.__module__}.{named.__qualname__}"}
    maker = None
    if isinstance(env, EnvFactory) or callable(env):
        factory = EnvFactory.from_any(env)
        env, maker = {TARGET: factory.config.target}, factory.maker
    given = {"run": run, "policy": policy, "env": env}
    given = {key: value for key, value in given.items() if value is not None}
    config = load_rollout_config({**given, **settings})
    env_factory = None
    if maker is not None:
        assert config.env is not None
        env_factory = EnvFactory(config.env, maker)
    return RolloutRunner(config, env_factory, own_policy).run()


def load_policy(run_dir: str | Path, trust: Sequence[str] = ()) -> TrainedPolicy:
    """The best policy of a run.

    Args:
        run_dir: Directory of a run, or of one saved policy (`<run dir>/policies/epoch_<n>`);
            `<run dir>@final` and `<run dir>@epoch_<n>` name those of checkpoints.
        trust: Modules of its networks, if these are of one's own: their code is run.

    Raises:
        ConfigError: If it names what is neither of this package nor of `torch.nn`, nor trusted.
        RunDirectoryError: If no policy was saved there, or a file is damaged.
    """
    saved = read_saved_policy(run_dir, trust)
    return TrainedPolicy(saved.make_model(), saved.observation_space, saved.action_space)  # type: ignore[arg-type]  # an ActingModel
