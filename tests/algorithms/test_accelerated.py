"""Gradients by hand of A2C, PPO and IMPALA: those of the losses, and turned off by any change."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from gymnasium import spaces
from update_problems import BOX, SETTINGS, B, N, T, make_model, make_rollout, snapshot

from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.a2c.learner import A2CLearner
from maze_train.algorithms.actor_critic.accelerated import accelerates
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.algorithms.impala.learner import ImpalaLearner
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.distributions.categorical import Categorical
from maze_train.learner.progress import Progress
from maze_train.nets.config import MemoryConfig, ObservationNormalizationConfig

ALGORITHMS = {
    "a2c": (A2CLearner, A2CAlgorithmConfig, {}),
    "ppo": (PPOLearner, PPOAlgorithmConfig, {"batch_size": 8, "n_optimization_epochs": 3}),
    "impala": (ImpalaLearner, ImpalaAlgorithmConfig, {}),
}
ACTIONS = {"discrete": spaces.Discrete(3), "box": spaces.Box(-1.0, 1.0, (2,))}
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
}


def make_learner(algorithm="ppo", actions="discrete", ordinary=False, model=None, **settings):
    """A learner; an ordinary one has a method of its own, which does what the parent's does."""
    learner_class, config_class, defaults = ALGORITHMS[algorithm]
    if ordinary:

        class Ordinary(learner_class):
            def outputs(self, *args):
                return super().outputs(*args)

        learner_class = Ordinary
    model = make_model(BOX, ACTIONS[actions], **(model or {}))
    given = {**SETTINGS, "lr": 0.01, "entropy_coef": 0.0625, **defaults, **settings}
    return learner_class(model, config_class(**given), seed=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("settings", [{}, {"critic_burn_in_epochs": 1}], ids=["all", "critic"])
def test_weights_and_statistics_are_those_of_autograd(algorithm, actions, dtype, settings):
    """After one update of normalised observations; while the critic burns in, too."""
    normalization = ObservationNormalizationConfig(mode="running")
    rollout = make_rollout(BOX, ACTIONS[actions])
    rollout = replace(rollout, log_probs=-1.0 - torch.rand(T, B), obs=rollout.obs.to(dtype))
    ends, rows = [], []
    for ordinary in (False, True):
        torch.manual_seed(0)
        model = {"normalization": normalization}
        learner = make_learner(algorithm, actions, ordinary, model, **settings)
        learner.module.to(dtype).normalizer.update(rollout.obs)
        rows.append(learner.update(copy.deepcopy(rollout), Progress()).reduce())
        assert learner.accelerated == (set() if ordinary else {"default"})
        ends.append(snapshot(learner.module))
    torch.testing.assert_close(ends[0], ends[1], **TOLERANCES[dtype])
    assert rows[0] == pytest.approx(rows[1], rel=1e-4, abs=1e-5)


class OwnFamily(Categorical):
    """A family of a user."""


MODELS = {
    "trunk": {"shared_trunk": True},
    "memory": {"memory": MemoryConfig(size=4)},
    "own policy": {"policy": {"_target_": "update_problems.OwnTemplate"}},
    "own critic": {"critic": {"_target_": "update_problems.OwnNet"}},
    "categorical critic": {"value_support": [-3, 3]},
    "own family": {"distributions": {"Discrete": {"_target_": f"{__name__}.OwnFamily"}}},
}
METHODS = (
    *("compute_losses", "compute_gradients", "compute_loss_for_module"),
    *("outputs", "value_loss", "policy_loss"),
)


@pytest.mark.parametrize("name", MODELS)
def test_other_networks_are_left_to_autograd(name):
    """Whatever the gradients are not derived for."""
    learner = make_learner(model=MODELS[name])
    assert not accelerates(learner, learner.module)


def test_other_families_and_settings_are_left_to_autograd():
    """Deviations that depend on the state, masks, clipped values, sums."""
    family = {"Box": {"name": "diagonal_gaussian", "state_dependent_std": True}}
    masked = make_model(
        spaces.Dict({"x": BOX, "action_mask": spaces.MultiBinary(3)}), ACTIONS["discrete"]
    )
    learner = make_learner()
    assert accelerates(learner, learner.module)
    assert not accelerates(learner, masked)
    for other in (
        make_learner("ppo", "box", model={"distributions": family}),
        make_learner("ppo", value_clip_range=0.5),
        make_learner("impala", loss_reduction="sum"),
    ):
        assert not accelerates(other, other.module)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_method_of_ones_own_turns_it_off(algorithm, method):
    """Of a subclass, or set on the learner itself."""
    learner = make_learner(algorithm)
    assert accelerates(learner, learner.module)
    original = getattr(learner, method)
    setattr(learner, method, lambda *args: original(*args))
    assert not accelerates(learner, learner.module)


def test_an_own_loss_is_a_function_that_returns_a_tensor():
    """A user's policy loss is differentiated: with a loss of zero the policy stays."""

    class NoLoss(PPOLearner):
        def policy_loss(self, log_probs, advantages, batch, statistics):
            assert log_probs.requires_grad
            return 0.0 * log_probs.sum()

    config = PPOAlgorithmConfig(n_rollout_steps=T, batch_size=N)
    learner = NoLoss(make_model(BOX, ACTIONS["discrete"]).float(), config)
    before = snapshot(learner.module)
    learner.update(make_rollout(BOX, ACTIONS["discrete"]), Progress())
    for name, param in learner.module.named_parameters():
        assert torch.equal(param, before[name]) is name.startswith("policy.")
