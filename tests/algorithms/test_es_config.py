"""Settings of evolution strategies: what follows from them, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import pytest
import yaml

from maze_train import EnvFactory, load_config
from maze_train.algorithms.es.build import ESBuilder
from maze_train.algorithms.es.config import ESAlgorithmConfig
from maze_train.algorithms.es.learner import ESLearner
from maze_train.algorithms.es.trainer import ESTrainer
from maze_train.config.loading import config_to_dict
from maze_train.config.resuming import FREE
from maze_train.errors import ConfigError
from maze_train.learner.config import Schedule
from maze_train.nets.policy_model import PolicyModel
from maze_train.rollout.es_rollouts import trained_size
from maze_train.runners.factory import build_runner
from maze_train.targets import locate
from maze_train.workers.places import LocalProcesses, ThisProcess


def load(**settings: Any) -> Any:
    """A configuration of ES on CartPole with some settings of the algorithm."""
    own = {f"algorithm.{key}": value for key, value in settings.items()}
    return load_config({"env": "CartPole-v1", "algorithm": "es", "runner": "dev", **own})


def load_run(**settings: Any) -> Any:
    """A small configuration of ES on CartPole with some settings of any section."""
    small = {"algorithm.noise_table_size": 1000, "model.hidden_sizes": [4], "seed": 1}
    return load_config({"env": "CartPole-v1", "algorithm": "es", **small, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_rollouts_per_update": 0}, r"algorithm\.n_rollouts_per_update = 0: .* >= 2"),
        ({"n_rollouts_per_update": 1}, r"algorithm\.n_rollouts_per_update = 1: .* >= 2"),
        ({"n_rollouts_per_update": 7}, r"algorithm\.n_rollouts_per_update = 7: .*an even number"),
        ({"n_rollouts_per_update": 2.5}, r"algorithm\.n_rollouts_per_update = 2\.5"),
        ({"n_timesteps_per_update": -1}, r"algorithm\.n_timesteps_per_update = -1: .* >= 0"),
        ({"max_steps": -1}, r"algorithm\.max_steps = -1: .* >= 0"),
        ({"noise_stddev": 0}, r"algorithm\.noise_stddev = 0\.0: expected a number > 0"),
        ({"noise_stddev": -0.1}, r"algorithm\.noise_stddev = -0\.1: expected a number > 0"),
        ({"noise_stddev": math.inf}, r"algorithm\.noise_stddev = inf: .*finite"),
        ({"noise_stddev": "linear_-0.5"}, r"algorithm\.noise_stddev = -0\.5: .* >= 0"),
        (
            {"noise_stddev": {"points": [[0, 0.1], [0.5, -0.2]]}},
            r"algorithm\.noise_stddev = -0\.2: .* >= 0",
        ),
        ({"noise_stddev": "cosine_0.1"}, r"algorithm\.noise_stddev = 'cosine_0\.1': .*linear_"),
        ({"lr": 0}, r"algorithm\.lr = 0\.0: expected a number > 0"),
        ({"lr": -1}, r"algorithm\.lr = -1\.0: expected a number > 0"),
        ({"lr": math.nan}, r"algorithm\.lr = nan: .*finite"),
        ({"lr": {"start": 0.1, "end": -0.1}}, r"algorithm\.lr = -0\.1: .* >= 0"),
        ({"optimizer": {}}, r"algorithm\.optimizer = \{\}: expected the key _target_"),
        ({"optimizer": {"momentum": 0.5}}, r"algorithm\.optimizer = .*expected the key _target_"),
        (
            {"optimizer": {"_target_": "maze_train.Adam", "lr": 0.5}},
            r"algorithm\.optimizer\.lr = 0\.5: set algorithm\.lr instead",
        ),
        ({"l2_penalty": -0.1}, r"algorithm\.l2_penalty = -0\.1: .* >= 0"),
        ({"l2_penalty": math.nan}, r"algorithm\.l2_penalty = nan"),
        ({"fitness_shaping": "centred_ranks"}, r"'centred_ranks': .*did you mean 'centered_ranks'"),
        ({"fitness_shaping": "ranks"}, r"algorithm\.fitness_shaping = 'ranks': .*normalized, raw"),
        ({"deterministic": "maybe"}, r"algorithm\.deterministic = 'maybe'"),
        ({"action_noise_stddev": -0.1}, r"algorithm\.action_noise_stddev = -0\.1: .* >= 0"),
        ({"max_grad_norm": -1}, r"algorithm\.max_grad_norm = -1\.0: .* >= 0"),
        ({"noise_table_size": 1}, r"algorithm\.noise_table_size = 1: .* >= 2"),
        ({"policy_wrapper": {}}, r"algorithm\.policy_wrapper = \{\}: expected the key _target_"),
        ({"policy_wrapper": {"place": 1}}, r"algorithm\.policy_wrapper = .*the key _target_"),
        ({"device": "cuda"}, r"algorithm\.device = 'cuda': .*expected cpu"),
        ({"device": "cuda:1"}, r"algorithm\.device = 'cuda:1': .*expected cpu"),
        ({"device": "tpu"}, r"algorithm\.device = 'tpu': expected cpu, cuda"),
        # What every algorithm has.
        ({"epoch_length": 0}, r"algorithm\.epoch_length = 0: .* >= 1"),
        ({"patience": -1}, r"algorithm\.patience = -1: .* >= 0"),
        ({"on_non_finite": "ignore"}, r"algorithm\.on_non_finite = 'ignore': .*raise, skip"),
        # What it has not.
        ({"n_rollouts": 8}, r"n_rollouts = 8: unknown; did you mean .*n_rollouts_per_update"),
        ({"sigma": 0.1}, r"algorithm\.sigma = 0\.1: unknown"),
        ({"gamma": 0.9}, r"algorithm\.gamma = 0\.9: unknown"),
    ],
    ids=str,
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    """By its key, its value, and what is expected instead."""
    with pytest.raises(ConfigError, match=message):
        load(**settings)


def test_what_is_accepted() -> None:
    """Both ends of every range."""
    config = load(
        n_rollouts_per_update=2,
        n_timesteps_per_update=1,
        max_steps=1,
        noise_stddev="linear_0.1",
        lr={"points": [[0, 0.5], [100, 0]], "by": "updates"},
        optimizer={"_target_": "torch.optim.SGD", "momentum": 0.5},
        l2_penalty=0,
        fitness_shaping="raw",
        deterministic=False,
        action_noise_stddev=0.5,
        max_grad_norm=0.5,
        noise_table_size=2,
        policy_wrapper={"_target_": "my_package.MyWrapper", "place": 1.5},
        device="auto",
        on_non_finite="skip",
    ).algorithm
    assert isinstance(config, ESAlgorithmConfig)
    assert config.noise_stddev == Schedule(start=0.1, end=0.0)
    assert config.lr == Schedule(points=[[0, 0.5], [100, 0]], by="updates")
    assert config.model_settings == {"policy_wrapper": config.policy_wrapper}


def test_defaults() -> None:
    """A population of 64, Adam, ranks, no clipping."""
    config = load().algorithm
    assert config == ESAlgorithmConfig()
    assert (config.n_rollouts_per_update, config.n_timesteps_per_update) == (64, 0)
    assert config.optimizer == {"_target_": "maze_train.Adam"}
    assert ESAlgorithmConfig().optimizer is not ESAlgorithmConfig().optimizer
    assert config.model_settings == {"policy_wrapper": None}


def test_a_configuration_is_yaml() -> None:
    """What is written is what was read."""
    text = """
        env: {id: CartPole-v1}
        algorithm:
          name: es
          noise_stddev: linear_0.1
          lr: {start: 0.1, end: 0.01}
          optimizer: {_target_: maze_train.SGD, momentum: 0.5}
          policy_wrapper: {_target_: my_package.MyWrapper, place: 1.5}
        runner: {name: local, n_workers: 3}
    """
    config = load_config(yaml.safe_load(text))
    assert config.algorithm.optimizer == {"_target_": "maze_train.SGD", "momentum": 0.5}
    written = yaml.safe_load(yaml.safe_dump(config_to_dict(config)))
    assert load_config(written) == config
    assert written["runner"]["concurrency"] == 64


def test_where_a_run_takes_place() -> None:
    """One runner takes place where the configuration says; there are two places."""
    for runner, expected in (("dev", ThisProcess), ("local", LocalProcesses)):
        found = build_runner(load_run(runner=runner))
        assert type(found.builder) is ESBuilder
        assert type(found.builder.context.place) is expected
    with pytest.raises(ConfigError, match=r"runner = 'ray'"):
        load_run(runner="ray")


def test_the_classes_that_carry_it_out() -> None:
    """Named by path, and of the kind that is named."""
    config = ESAlgorithmConfig()
    assert locate(config.learner_class) is ESLearner
    assert locate(config.trainer_class) is ESTrainer
    with build_runner(load_run()) as runner:
        assert type(runner.builder.build_model()) is PolicyModel


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_environments_of_other_backends(backend: str) -> None:
    """They do not begin the episode that a member is to play."""
    with pytest.raises(ConfigError, match=rf"env\.backend = '{backend}': .*expected gymnasium"):
        build_runner(load_run(**{"env.backend": backend}))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("critic", {"_target_": "torch.nn.Identity"}),
        ("critic_hidden_sizes", [4]),
        ("value_transform", {"_target_": "maze_train.ReduceScaleValueTransform"}),
        ("value_support", [-3, 3]),
    ],
)
def test_a_critic_is_refused(setting: str, value: Any) -> None:
    """There is none, so nothing can be said about it."""
    config = load_run(**{f"model.{setting}": value})
    with (
        build_runner(config) as runner,
        pytest.raises(ConfigError, match=rf"model\.{setting} = .*leave it out"),
    ):
        runner.builder.prepare(runner.builder.build_model())


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "maze_train.Adm"}, r"algorithm\.optimizer\._target_ = 'maze_train\.Adm': "),
        ({"_target_": "torch.nn.Linear"}, r"expected a torch\.optim\.Optimizer"),
        ({"_target_": "torch.optim.LBFGS"}, r"evaluates the loss several times"),
        ({"_target_": "maze_train.Adam", "eps": 0}, r"algorithm\.optimizer.*eps = 0"),
    ],
)
def test_an_optimizer_that_can_not_be_built(node: dict[str, Any], message: str) -> None:
    """Its key is named."""
    with (
        build_runner(load_run(**{"algorithm.optimizer": node})) as runner,
        pytest.raises(ConfigError, match=message),
    ):
        runner.builder.prepare(runner.builder.build_model())


def test_a_noise_table_that_is_too_small() -> None:
    """One that holds no two vectors; one number more than the policy has is enough."""
    with build_runner(load_run()) as runner:
        dim = trained_size(runner.builder.build_model())
    assert dim == 4 * 4 + 4 + 4 * 2 + 2
    message = rf"algorithm\.noise_table_size = {dim}: expected more than {dim}, the number of param"
    with (
        build_runner(load_run(**{"algorithm.noise_table_size": dim})) as runner,
        pytest.raises(ConfigError, match=message),
    ):
        runner.builder.prepare(runner.builder.build_model())
    with build_runner(load_run(**{"algorithm.noise_table_size": dim + 1})) as runner:
        runner.builder.prepare(runner.builder.build_model())


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deviation_that_makes_no_difference_is_not_trained(deterministic: bool) -> None:
    """That of a Gaussian counts only where actions are sampled; it is in the policy anyway."""
    more = {"env": "Pendulum-v1", "algorithm.deterministic": deterministic}
    with build_runner(load_run(**more)) as runner:
        model: Any = runner.builder.build_model()
        assert model.policy.free_params.requires_grad is not deterministic
        assert trained_size(model) == 3 * 4 + 4 + 4 + 1 + (not deterministic)
        assert "policy.free_params" in model.state_dict()


# -- how many play at a time ---------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "expected"), [("es", 64), ("ppo", 8), ("a2c", 8)])
def test_default_concurrency(algorithm: str, expected: int) -> None:
    """As many as suit the algorithm, unless they are set."""
    node = {"env": "CartPole-v1", "algorithm": algorithm}
    assert load_config(node).runner.concurrency == expected
    assert load_config({**node, "runner.concurrency": 0}).runner.concurrency == expected
    assert load_config({**node, "runner.concurrency": 16}).runner.concurrency == 16
    with pytest.raises(ConfigError, match=r"runner\.concurrency = -1"):
        load_config({**node, "runner.concurrency": -1})


@pytest.mark.parametrize("runner", ["dev", "local"])
@pytest.mark.parametrize(
    ("concurrency", "episodes", "steps", "expected"),
    [
        (0, 64, 0, 64),
        (0, 200, 0, 64),
        (0, 10, 0, 10),
        (0, 10, 1, 64),
        (100, 64, 0, 64),
        (100, 64, 500, 100),
        (3, 10, 0, 3),
        (3, 2, 0, 2),
        (3, 2, 50, 3),
    ],
)
def test_no_slot_is_there_for_nothing(
    runner: str, concurrency: int, episodes: int, steps: int, expected: int
) -> None:
    """Not more than an update has members, unless it may need more for its steps."""
    settings = {
        "algorithm.n_rollouts_per_update": episodes,
        "algorithm.n_timesteps_per_update": steps,
        "runner": runner,
        "runner.concurrency": concurrency,
    }
    made: Any = build_runner(load_run(**settings))
    assert made.builder.num_slots == expected


def test_as_many_environments_as_slots() -> None:
    """With `max_steps` they are cut."""
    built: list[Any] = []

    def make() -> Any:
        built.append(gymnasium.make("Pendulum-v1"))
        return built[-1]

    config = load_run(**{"algorithm.n_rollouts_per_update": 6, "algorithm.max_steps": 7})
    with build_runner(config, EnvFactory.from_any(make)) as runner:
        runner.builder.prepare(runner.builder.build_model())
        assert len(built) == 6
        env = runner.builder.member_env_factory()()  # type: ignore[attr-defined]  # that of ES
        env.reset(seed=0)
        ends = [env.step([0.0])[2:4] for _ in range(7)]
        env.close()
        assert ends == [(False, False)] * 6 + [(False, True)]


def test_a_trial_is_one_pair() -> None:
    """One epoch of one update of one pair, in as many environments; no episode is endless."""
    settings = {"algorithm.n_timesteps_per_update": 5000, "algorithm.epoch_length": 7}
    trial = {"runner.fast_dev_run": True}
    for max_steps, expected in ((0, 10), (1000, 10), (3, 3)):
        settings["algorithm.max_steps"] = max_steps
        runner: Any = build_runner(load_run(**settings, **trial))
        assert runner.config.algorithm.max_steps == expected
    config = runner.config.algorithm
    assert isinstance(config, ESAlgorithmConfig)
    assert (config.n_epochs, config.epoch_length) == (1, 1)
    assert (config.n_rollouts_per_update, config.n_timesteps_per_update) == (2, 0)
    assert runner.builder.num_slots == 2


def test_a_run_that_is_continued_keeps_what_decides_numbers() -> None:
    """Nothing of the settings of ES alone may change on the way."""
    own = set(ESAlgorithmConfig.__annotations__) - {"name", "learner_class", "trainer_class"}
    assert {f"algorithm.{name}" for name in own} & set(FREE) <= {"algorithm.device"}
