"""Analytic gradients of A2C, PPO and IMPALA match autograd, and are disabled by custom code."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from cases import sweep
from gymnasium import spaces
from update_problems import BOX, LEARNERS, SETTINGS, B, T, make_model, make_rollout, snapshot

from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.core.events import Statistics
from maze_train.core.types import tree_map
from maze_train.distributions.categorical import Categorical
from maze_train.learner.config import Freeze, Progress
from maze_train.nets.config import ObservationNormalizationConfig, RecurrentConfig


class OwnLosses(PPOLearner):
    """Learner with custom losses and a matching analytic policy gradient."""

    analytic_gradients: ClassVar = {"value_clip_range": 0.0}

    def policy_loss(self, *args):
        return 3.0 * super().policy_loss(*args)

    def policy_loss_gradient(self, *args):
        return 3.0 * super().policy_loss_gradient(*args)

    def value_loss(self, *args):
        return super().value_loss(*args)


ALGORITHMS = {**LEARNERS, "own": (OwnLosses, PPOAlgorithmConfig, {"batch_size": 8})}
ACTIONS = {"discrete": spaces.Discrete(3), "box": spaces.Box(-1.0, 1.0, (2,))}
PARTS = spaces.Dict({"x": BOX, "gear": spaces.Discrete(3)})
NARROW = {"Box": {"name": "diagonal_gaussian", "log_std_min": -0.1, "log_std_max": 0.1}}
"""Bounds of log_std that some perturbed parameters exceed."""
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
}


@pytest.fixture(autouse=True)
def _as_before():
    """Seed the random numbers of each test and restore the default dtype afterwards."""
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def make_learner(
    algorithm="ppo", actions="discrete", ordinary=False, model=None, space=BOX, **settings
):
    """Return a learner; `ordinary` overrides `outputs`, which disables analytic gradients."""
    learner_class, config_class, defaults = ALGORITHMS[algorithm]
    if ordinary:

        class Ordinary(learner_class):
            def outputs(self, *args):
                return super().outputs(*args)

        learner_class = Ordinary
    model = make_model(space, ACTIONS[actions], **(model or {}))
    given = {**SETTINGS, "lr": 0.01, "entropy_coef": 0.0625, **defaults, **settings}
    return learner_class(model, config_class(**given), seed=3)


def by_hand(learner):
    """Return the ids of the modules whose gradients an update computes analytically."""
    learner.before_gradient_based_update(Progress(), Statistics())
    return {key for key in learner.modules if not learner.uses_autograd(key)}


def compare(dtype, algorithm, actions, space=BOX, model=None, masks=None, **settings):
    """Assert that analytic and autograd updates give the same weights and statistics.

    Returns the ids of the modules with analytic gradients in each of the two updates.
    """
    model = {"normalization": ObservationNormalizationConfig(mode="running"), **(model or {})}
    rollout = make_rollout(space, ACTIONS[actions])
    obs = tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, rollout.obs)
    if masks is not None:
        obs = {**obs, "action_mask": masks}
        last = torch.ones(len(rollout.final_positions), 3)
        rollout = replace(rollout, final_obs={**rollout.final_obs, "action_mask": last})
    rollout = replace(rollout, log_probs=-1.0 - torch.rand(T, B), obs=obs)
    torch.set_default_dtype(dtype)  # encoders convert integers to the default dtype
    ends, rows, used = [], [], []
    for ordinary in (False, True):
        learner = make_learner(algorithm, actions, ordinary, model, space, **settings)
        learner.module.to(dtype).normalizer.update(rollout.obs)
        rows.append(learner.update(copy.deepcopy(rollout), Progress()).reduce())
        used.append(by_hand(learner))
        ends.append(snapshot(learner.module))
    torch.testing.assert_close(ends[0], ends[1], **TOLERANCES[dtype])
    assert rows[0] == pytest.approx(rows[1], rel=1e-4, abs=1e-5)
    return used


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_update_is_that_of_autograd(algorithm, actions, dtype):
    """Weights and statistics match autograd after one update with normalized observations."""
    assert compare(dtype, algorithm, actions) == [{"default"}, set()]


@pytest.mark.parametrize(
    "changes",
    [
        {"critic_burn_in_epochs": 1},
        {"lr_factors": {"critic": 2.0, "*.bias": 0.5}, "freeze": [Freeze(params=["policy.net"])]},
        {"model": {"shared_trunk": True}},
        {"model": {"shared_trunk": True}, "critic_burn_in_epochs": 1},
        {"model": {"distributions": NARROW}},
        {"space": PARTS},
        {"space": PARTS, "model": {"critic_obs": ["gear"]}},
        {"space": PARTS, "model": {"shared_trunk": True}},
        {"model": {"activation": "gelu"}, "normalize_advantage": False, "policy_loss_coef": 0.5},
    ],
    ids=str,
)
def test_other_networks_and_settings(changes):
    """Shared trunks, Dict observations, burn-in and other settings match autograd."""
    assert compare(torch.float64, "ppo", "box", **changes) == [{"default"}, set()]


def test_a_learning_rate_that_follows_the_divergence():
    """An adaptive learning rate changes as with autograd."""
    lr = {"adaptive_kl": 0.05, "start": 0.01}
    assert compare(torch.float64, "ppo", "box", lr=lr) == [{"default"}, set()]


def own_loss(learner, module_id, batch, statistics):
    """Return the loss of the algorithm from a user-defined function."""
    return learner.compute_loss_for_module(module_id, batch, statistics)


class OwnFamily(Categorical):
    """User-defined distribution."""


MODELS = {
    "memory": {"rnn": RecurrentConfig(size=4)},
    "own policy": {"policy": {"_target_": "update_problems.OwnTemplate"}},
    "own trunk": {"shared_trunk": True, "trunk": {"_target_": "update_problems.OwnTemplate"}},
    "own critic": {"critic": {"_target_": "update_problems.OwnNet"}},
    "categorical critic": {"value_support": [-3, 3]},
    "own family": {"distributions": {"Discrete": {"_target_": f"{__name__}.OwnFamily"}}},
}
OWN_METHODS = (
    *("compute_losses", "compute_gradients", "compute_loss_for_module"),
    *("outputs", "value_loss", "policy_loss", "policy_loss_gradient"),
    *("weighted_value_loss", "weighted_policy_loss"),
)


@pytest.mark.parametrize("name", MODELS)
def test_other_networks_are_left_to_autograd(name):
    """Networks without analytic gradients use autograd."""
    learner = make_learner(model=MODELS[name])
    assert by_hand(learner) == set()


def test_other_families_and_settings_are_left_to_autograd():
    """State-dependent std, value clipping, sum reduction and custom losses use autograd."""
    family = {"Box": {"name": "diagonal_gaussian", "state_dependent_std": True}}
    for other in (
        make_learner("ppo", "box", model={"distributions": family}),
        make_learner("ppo", value_clip_range=0.5),
        make_learner("own", value_clip_range=0.5),
        make_learner("impala", loss_reduction="sum"),
        make_learner("ppo", loss_function={"_target_": f"{__name__}.own_loss"}),
    ):
        assert by_hand(other) == set()
    learner = make_learner("ppo")
    with torch.autograd.set_detect_anomaly(True):  # anomaly detection requires autograd
        assert by_hand(learner) == set()
    assert by_hand(learner) == {"default"}


@pytest.mark.parametrize("part", ["policy", "policy.net", "policy.net.encoder", "critic.layers"])
def test_hooked_modules_are_left_to_autograd(part):
    """Modules with forward hooks use autograd, because analytic gradients do not call hooks."""
    learner = make_learner()
    hook = learner.modules["default"].get_submodule(part).register_forward_hook(lambda *_: None)
    assert by_hand(learner) == set()
    hook.remove()
    assert by_hand(learner) == {"default"}


@pytest.mark.parametrize("method", OWN_METHODS)
@sweep("algorithm", ALGORITHMS)
def test_a_method_of_ones_own_turns_it_off(algorithm, method):
    """A method overridden in a subclass or on the instance disables analytic gradients."""
    learner = make_learner(algorithm)
    assert by_hand(learner) == {"default"}
    original = getattr(learner, method)
    setattr(learner, method, lambda *args: original(*args))
    assert by_hand(learner) == set()
    delattr(learner, method)
    own = {method: lambda self, *args: original(*args)}
    learner.__class__ = type("Own", (type(learner),), own)
    assert by_hand(learner) == set()
    if method.startswith("policy_loss"):  # a loss and its gradient must be overridden together
        type(learner).analytic_gradients = {}
        assert by_hand(learner) == set()
