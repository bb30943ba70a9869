"""A custom off-policy algorithm requires no changes of the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from own_dqn import DQNConfig, build_model
from torch import nn

from maze_train import Learner, load_policy, train
from maze_train.nets.config import ObservationNormalizationConfig
from maze_train.nets.normalization import ObservationNormalizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maze_train.core.types import Tensor

SETTINGS: dict[str, Any] = {
    "algorithm": {
        "_target_": "own_dqn.DQNConfig",
        "lr": 2e-3,
        "tau": 0.05,
        "gamma": 0.95,
        "batch_size": 64,
        "initial_buffer_size": 200,
        "epoch_length": 250,
        "temperature": 0.5,
    },
    "runner.concurrency": 4,
    "evaluation.n_episodes": 5,
    "tracking": {"progress": "quiet", "plot": False, "tensorboard": False},
    "seed": 1,
}


def run(name: str, **changes: Any) -> Any:
    """Run a short training."""
    return train("CartPole-v1", **{**SETTINGS, "run_dir": name, **changes})


@dataclass(kw_only=True)
class PlainConfig(DQNConfig):
    """The same model with observation statistics, and a learner of another base class."""

    name: ClassVar[str] = "plain"
    learner_class: ClassVar[str] = f"{__name__}.PlainLearner"
    model_builder: ClassVar[str] = f"{__name__}.build_observing"


def build_observing(config: Any, observation_space: Any, *args: Any, **settings: Any) -> nn.Module:
    """A model whose normalizer is not an attribute of the model."""
    model = build_model(config, observation_space, *args, **settings)
    observed = ObservationNormalizer(observation_space, ObservationNormalizationConfig(n_steps=400))
    model.around = nn.ModuleList([observed])
    return model


class PlainLearner(Learner[Any, Any, Any]):
    """Predicts rewards; reports errors for prioritized replay."""

    def preprocess(self, module_id: str, experience: Any, statistics: Any) -> Any:
        return experience

    def minibatches(self, prepared: Any, statistics: Any) -> Iterator[Any]:
        yield prepared

    def compute_loss_for_module(self, module_id: str, batch: Any, statistics: Any) -> Tensor:
        model: Any = self.modules[module_id]
        chosen = model.q(batch.obs).gather(-1, batch.actions.long()[:, None])[:, 0]
        errors: Tensor = chosen - batch.rewards
        statistics.keep("td_errors", errors.abs())
        return errors.square().mean()


def test_custom_off_policy_learner_needs_no_base_class(tmp_path: Path) -> None:
    """Any learner updates observation statistics and reports errors for prioritized replay."""
    result = run(
        str(tmp_path / "run"),
        total_steps=200,
        **{
            "algorithm._target_": f"{__name__}.PlainConfig",
            "algorithm.initial_buffer_size": 100,
            "algorithm.epoch_length": 25,
            "algorithm.replay_buffer": "prioritized",
        },
    )
    (normalizer,) = result.policy.model.around
    assert normalizer.count == 400 + 200
    assert result.history[-1]["train/gradient_steps"] > 0


@pytest.mark.learning
@pytest.mark.exhaustive
def test_custom_off_policy_algorithm_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The custom algorithm learns with the trainer, builder and buffer of SAC."""
    monkeypatch.chdir(tmp_path)
    result = run("run", total_steps=3000)
    assert result.best_metric >= 100
    assert result.history[-1]["train/td_loss"] > 0
    assert load_policy("run", ["own_dqn"]).act(np.zeros(4)) in (0, 1)
