"""Training from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gymnasium import Env
from gymnasium.vector import VectorEnv

from maze_train.config.compose import PRESETS, load_config, merged
from maze_train.config.train_config import AUTO, TrainConfig
from maze_train.core.conversion import key_of_field
from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import EnvFactory
from maze_train.run.assembly import Assembly, after_restart, load_resumed
from maze_train.run.runner import TrainingResult, TrainingRunner
from maze_train.workers.backends import refuse_import

SHORT = {
    "evaluators": "evaluation.evaluators",
    "writers": "tracking.writers",
    "wrappers": "env.wrappers",
}
"""Settings with short names in `train`."""


def make_runner(config: TrainConfig) -> TrainingRunner:
    """Return the runner of a configuration, with all optional parts available.

    After a restart by torchrun, the runner resumes the run of the earlier attempt.

        with make_runner(load_config({"algorithm": "ppo", "env": "CartPole-v1"})) as runner:
            result = runner.run()

    Raises:
        ConfigError: See `TrainingRunner`.
        RunDirectoryError: See `TrainingRunner`.
    """
    return TrainingRunner(after_restart(config), Assembly())


def train(
    env: str
    | Callable[..., Env[Any, Any]]
    | VectorEnv[Any, Any, Any]
    | EnvConfig
    | TrainConfig
    | Mapping[str, Any]
    | None = None,
    algorithm: str | Mapping[str, Any] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train a policy, or resume a run.

        result = train(env="CartPole-v1", algorithm="ppo", total_steps=50_000)
        action = result.policy.act(observation)
        result = train(resume=result.run_dir, total_steps=100_000)
        result = train(experiment="ppo/HalfCheetah-v5", seed=1)

    Args:
        env: Registered ID, environment class, factory function, vector environment, or settings of
            the `env` section as a mapping or an `EnvConfig`. None: no environment (for algorithms
            that learn from datasets). Also accepts a whole configuration: a mapping such as a
            `DictConfig` that Hydra composed, overridden by the other arguments; or a `TrainConfig`,
            without other arguments.
        algorithm: Name of an algorithm, or its settings as a mapping with `_target_`. None: the
            algorithm of `experiment`, otherwise PPO.
        overrides: Settings by dotted name as on the command line: `{"algorithm.lr": 1e-3}`.
        **settings: Settings by top-level name: `total_steps=50_000`, `seed=1`, `runner="local"`;
            sections: `evaluation={"n_episodes": 20}`; or dotted names: `**{"algorithm.lr": 1e-3}`.
            `experiment="ppo/CartPole-v1"` selects a preset; other settings override the preset.
            With `resume=<run directory>`, settings override the stored settings of the run.
            Classes, functions and objects can be passed in place of names:
            `callbacks=[StopAtReturn(475)]`, `model={"policy": MyNet}`. Objects that cannot be
            imported by name must be passed again with `resume`. `evaluators`, `writers` and
            `wrappers` are short for the settings in `evaluation`, `tracking` and `env`.

    Returns:
        Result with metrics, run directory and the best policy.

    Raises:
        ConfigError: If a setting is invalid. Raised before anything is written.
        Interrupted: If SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 was received. Raised
            after a checkpoint was saved.
        MazeTrainError: If training failed.
    """
    refuse_import()
    settings = {
        SHORT.get(name, name): value for name, value in {**settings, **(overrides or {})}.items()
    }
    if isinstance(env, TrainConfig):
        if algorithm is not None or settings:
            problem = "a TrainConfig takes no other arguments; use dataclasses.replace(config, ...)"
            raise ConfigError("train", problem)
        return make_runner(env).run()
    if isinstance(env, Mapping) and env.keys() & {*TrainConfig.hints(), PRESETS}:
        named = {} if algorithm is None else {"algorithm": algorithm}
        settings = merged(env, {**named, **settings})
        env, algorithm = settings.pop("env", None), settings.pop("algorithm", None)
    given: dict[str, Any] = {} if env is None else {"env": env}  # Not needed for datasets.
    if not isinstance(env, str | Mapping | None):
        config = EnvFactory.from_any(env).config
        names = config.hints() if isinstance(env, EnvConfig) else ("id", "target", "backend")
        given["env"] = {key_of_field(name): config.value_of(name) for name in names}
    if algorithm is None and settings.get("resume") not in (None, AUTO):
        if not isinstance(env, str | Mapping | EnvConfig | None):
            given = {"env._target_": given["env"][TARGET]}
        changes = {**settings, **given}
        return make_runner(load_resumed(str(changes["resume"]), changes)).run()
    runner = settings.get("runner")
    if isinstance(env, VectorEnv) and not (isinstance(runner, Mapping) and "concurrency" in runner):
        given["runner.concurrency"] = env.num_envs
    if algorithm is not None or settings.get(PRESETS) is None:
        given["algorithm"] = algorithm or "ppo"
    return make_runner(load_config({**given, **settings})).run()
