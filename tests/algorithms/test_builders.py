"""Objects of runs of each algorithm, built from settings, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from gymnasium import spaces
from torch import nn
from update_problems import B, T, make_rollout

from maze_train import load_config
from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.es.population import trained_size
from maze_train.algorithms.off_policy.learner import OffPolicyLearner
from maze_train.core.errors import ConfigError
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.run.build import build_run

if TYPE_CHECKING:
    from pathlib import Path

ES: dict[str, Any] = {"algorithm": "es", "algorithm.noise_table_size": 1000}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory."""
    monkeypatch.chdir(tmp_path)


def make(**settings: Any) -> Any:
    """Return a built run of a small configuration on CartPole."""
    small = {"model.hidden_sizes": [4], "seed": 1}
    return build_run(load_config({"env": "CartPole-v1", **small, **settings}))


def test_every_model_of_a_run_has_the_same_initial_weights() -> None:
    """Workers build models that are identical to the model of the run."""
    with make(algorithm="sac") as made:
        one, two = made.model.state_dict(), made.model_maker()().state_dict()
        assert all((one[key] == two[key]).all() for key in one)


def test_a_run_that_is_only_built_leaves_no_files(tmp_path: Path) -> None:
    """The directory of a run that did not start is removed, with its parents."""
    with make(algorithm="ppo") as made:
        assert made.directory.path.is_dir()
    assert not list(tmp_path.iterdir())


class NotATrainer(A2CAlgorithmConfig):
    """Settings whose trainer class is not a Trainer."""

    name: ClassVar[str] = "odd"
    trainer_class: ClassVar[str] = "maze_train.A2CLearner"


class WithoutLearner(A2CAlgorithmConfig):
    """Settings whose learner class does not exist."""

    learner_class: ClassVar[str] = "maze_train.A2CLerner"


def test_what_is_no_trainer_or_learner_raises() -> None:
    """Errors name the setting and what is expected."""
    missing = r"algorithm\.learner_class = 'maze_train\.A2CLerner': .* did you mean A2CLearner"
    with pytest.raises(ConfigError, match=missing):
        make(algorithm={"_target_": "test_builders.WithoutLearner"})
    with pytest.raises(ConfigError, match=r"trainer_class = .* subclass of maze_train\.Trainer"):
        make(algorithm={"_target_": "test_builders.NotATrainer"})


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_deterministic_reaches_evaluators(deterministic: bool) -> None:
    """Evaluations during training and the final test use `evaluation.deterministic`."""
    settings = {"evaluation.deterministic": deterministic, "evaluation.final_episodes": 2}
    with make(algorithm="ppo", **settings) as made:
        evaluators: list[Any] = [made.evaluator, made.final_evaluator]
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
    with pytest.raises(ConfigError, match=message):
        make(**settings)


@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "impala", "sac", "td3", "dqn", "es"])
def test_normalizer_is_found_in_submodules(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders and off-policy learners find a normalizer that is not an attribute of the model."""
    settings: dict[str, Any] = {
        **(ES if algorithm == "es" else {"algorithm": algorithm, "runner.concurrency": 8}),
        "env": "Pendulum-v1" if algorithm == "td3" else "CartPole-v1",
        "model.normalization.mode": "running",
    }
    with make(**settings) as made:
        model, found = made.model, {}
        normalizer = model.normalizer
        del model.normalizer
        model.inner = nn.ModuleList([normalizer])
        monkeypatch.setattr(made, "begin_statistics", lambda own, *_, **__: found.update(own))
        made.trainer.before_training()
        assert found == {DEFAULT_MODULE: normalizer}
        learner = made.learners.first
        if isinstance(learner, OffPolicyLearner):
            size = len(normalizer.mean)
            space = spaces.Box(-1.0, 1.0, (size,))
            learner.observe(make_rollout(space, spaces.Discrete(2)))
            assert normalizer.count == T * B


# -- evolution strategies ------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
def test_es_trains_log_std_only_if_sampled(deterministic: bool) -> None:
    """The std of a Gaussian is trained only if actions are sampled; it is always a parameter."""
    with make(**ES, env="Pendulum-v1", **{"algorithm.deterministic": deterministic}) as made:
        model = made.model
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
def test_only_runs_with_checkpoints_store_actions(settings: dict[str, Any], is_kept: bool) -> None:
    """Only training environments of runs with checkpoints store actions."""
    given = {"algorithm": "a2c", "runner.concurrency": 1, "algorithm.n_rollout_steps": 4}
    with make(**given, **settings) as made:
        for training in (True, False):
            with made.make_env(1, training=training) as env:
                assert env.can_be_restored is (training and is_kept)
