"""Builders of algorithms: parts built from settings, and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from gymnasium import spaces
from torch import nn
from update_problems import B, T, make_rollout

from maze_train import AlgorithmBuilder, load_config
from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.es.population import trained_size
from maze_train.algorithms.off_policy.learner import OffPolicyLearner
from maze_train.core.errors import ConfigError
from maze_train.core.targets import locate
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.run.train import make_runner

ES: dict[str, Any] = {"algorithm": "es", "algorithm.noise_table_size": 1000}


def make(**settings: Any) -> Any:
    """Return a runner of a small configuration on CartPole."""
    small = {"model.hidden_sizes": [4], "seed": 1}
    return make_runner(load_config({"env": "CartPole-v1", **small, **settings}))


def prepared_model(runner: Any) -> Any:
    """Build model, learner and source of experience; return the model."""
    model = runner.builder.build_model()
    runner.builder.prepare(model)
    return model


def test_a_model_is_built_without_effects() -> None:
    """Every call returns the same weights, and no learner is created."""
    with make(algorithm="sac") as made:
        one, two = (made.builder.build_model().state_dict() for _ in range(2))
        assert all((one[key] == two[key]).all() for key in one)
        assert not hasattr(made.builder, "learners")


class NotABuilder(A2CAlgorithmConfig):
    """Settings whose builder class is not an AlgorithmBuilder."""

    name: ClassVar[str] = "odd"
    builder_class: ClassVar[str] = "maze_train.A2C"


class WithoutLearner(A2CAlgorithmConfig):
    """Settings whose learner class does not exist."""

    learner_class: ClassVar[str] = "maze_train.A2CLerner"


def test_what_is_no_builder_or_learner_is_refused() -> None:
    """Errors name the setting and what is expected."""
    missing = r"algorithm\.learner_class = 'maze_train\.A2CLerner': .* did you mean A2CLearner"
    with pytest.raises(ConfigError, match=missing):
        prepared_model(make(algorithm={"_target_": "test_builders.WithoutLearner"}))
    with pytest.raises(ConfigError, match=r"subclass of maze_train\.AlgorithmBuilder"):
        make(algorithm={"_target_": "test_builders.NotABuilder"})
    assert not issubclass(locate(NotABuilder.builder_class), AlgorithmBuilder)


@pytest.mark.parametrize("deterministic", [True, False])
def test_settings_of_evaluations_reach_them(deterministic: bool) -> None:
    """Evaluations during training and the final test use `evaluation.deterministic`."""
    settings = {"evaluation.deterministic": deterministic, "evaluation.final_episodes": 2}
    with make(algorithm="ppo", **settings) as made:
        prepared_model(made)
        evaluators: list[Any] = made.builder.build_evaluators()
        evaluators.append(made.builder.build_final_evaluator())
        assert [own.deterministic for own in evaluators] == [deterministic] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm": "ppo", "algorithm.sequence_length": 8},
            r"sequence_length = 8: .*model\.rnn",
        ),
        ({**ES, "env.backend": "native"}, r"env\.backend = 'native': .*expected gymnasium"),
        ({**ES, "env.backend": "envpool"}, r"env\.backend = 'envpool': .*expected gymnasium"),
        ({**ES, "model.critic": {"_target_": "torch.nn.Identity"}}, r"model\.critic = .*remove"),
        ({**ES, "model.critic_hidden_sizes": [4]}, r"critic_hidden_sizes = \[4\]: .*remove this"),
        ({**ES, "model.value_support": [-3, 3]}, r"model\.value_support = .*remove this"),
        (
            {**ES, "algorithm.noise_table_size": 10**13},
            r"requires 40000\.00 GB, but .* free: reduce",
        ),
        ({**ES, "algorithm.action_noise_stddev": 0.1}, r"stddev = 0\.1: Discrete"),
        ({**ES, "algorithm.optimizer": {"_target_": "maze_train.Adm"}}, r"optimizer\._target_ = "),
        ({**ES, "algorithm.optimizer": {"_target_": "maze_train.RMSpropTF", "eps": 0}}, "eps = 0"),
    ],
    ids=str,
)
def test_what_does_not_fit(settings: dict[str, Any], message: str) -> None:
    """Invalid settings raise ConfigError before the run directory is created."""
    with pytest.raises(ConfigError, match=message), make(**settings) as made:
        prepared_model(made)


@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "impala", "sac", "td3", "dqn", "es"])
def test_normalizers_are_found_in_submodules(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builders and off-policy learners find a normalizer that is not an attribute of the model."""
    settings: dict[str, Any] = {
        **(ES if algorithm == "es" else {"algorithm": algorithm, "runner.concurrency": 8}),
        "env": "Pendulum-v1" if algorithm == "td3" else "CartPole-v1",
        "model.normalization.mode": "running",
    }
    with make(**settings) as made:
        model, found = prepared_model(made), {}
        normalizer = model.normalizer
        del model.normalizer
        model.inner = nn.ModuleList([normalizer])
        monkeypatch.setattr(made.builder, "begin_statistics", lambda own, *_: found.update(own))
        made.builder.before_training(SimpleNamespace(model=model))
        assert found == {DEFAULT_MODULE: normalizer}
        learner = made.builder.learners.first
        if isinstance(learner, OffPolicyLearner):
            size = len(normalizer.mean)
            space = spaces.Box(-1.0, 1.0, (size,))
            learner.observe(make_rollout(space, spaces.Discrete(2)))
            assert normalizer.count == T * B


# -- evolution strategies ------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deviation_that_makes_no_difference_is_not_trained(deterministic: bool) -> None:
    """The std of a Gaussian is trained only if actions are sampled; it is always a parameter."""
    with make(**ES, env="Pendulum-v1", **{"algorithm.deterministic": deterministic}) as made:
        model = made.builder.build_model()
        assert model.policy.free_params.requires_grad is not deterministic
        assert trained_size(model) == 3 * 4 + 4 + 4 + 1 + (not deterministic)
        assert "policy.free_params" in model.state_dict()


@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [
        ({}, True),
        ({"checkpoint.interval": 0}, False),
        ({"checkpoint.interval": 0, "checkpoint.interval_minutes": 1}, True),
        ({"checkpoint.interval": 0, "checkpoint.interval_steps": 64}, True),
    ],
)
def test_only_checkpoints_need_the_actions_of_episodes(
    settings: dict[str, Any], is_kept: bool
) -> None:
    """Only training environments of runs with checkpoints store actions."""
    given = {"algorithm": "a2c", "runner.concurrency": 1, "algorithm.n_rollout_steps": 4}
    with make(**given, **settings) as made:
        for training in (True, False):
            with made.builder.context.make_env(1, training=training) as env:
                assert env.can_be_restored is (training and is_kept)
