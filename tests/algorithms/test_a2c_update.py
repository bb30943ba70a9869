from __future__ import annotations

import pytest
import torch
from cases import sweep
from reference_actor_critic import Coefficients, slow_update
from update_problems import (
    PROBLEMS,
    SETTINGS,
    N,
    assert_same_weights,
    make_problem,
    snapshot,
)

from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.a2c.learner import A2CLearner
from maze_train.events import Statistics
from maze_train.learner.config import Progress, Schedule

ALL = [[list(range(N))]]
SUPPORT = [-3, 3]
TRANSFORM = {"_target_": "maze_train.ReduceScaleValueTransform", "epsilon": 0.01}


@pytest.fixture(autouse=True)
def _float64():
    """Everything in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_config(**settings):
    """Settings whose numbers are exact in float32."""
    return A2CAlgorithmConfig(**{**SETTINGS, "lr": 0.01, "entropy_coef": 0.02, **settings})


def compare(problem, config, critic=None, progress=None, updates=1, now=None):
    """Update model and reference alike, and compare all weights."""
    model, reference, rollout, action_space = problem
    before = snapshot(model)
    learner = A2CLearner(model, config)
    for _ in range(updates):
        statistics = learner.update(rollout, progress or Progress())
    now = now or Coefficients(lr=0.01, entropy=config.entropy_coef)
    slow_update(reference, rollout, action_space, config, ALL, now, critic)
    assert_same_weights(model, reference, before)
    return statistics.reduce()


@pytest.mark.parametrize("name", PROBLEMS)
@sweep("shared", [False, True])
@sweep("normalize", [False, True])
def test_update_equals_the_reference(name, normalize, shared):
    """One update gives the weights that the definitions give, in every space."""
    config = make_config(normalize_advantage=normalize)
    row = compare(make_problem(name, shared_trunk=shared), config)
    assert row["train/gradient_steps"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"entropy_coef": 0.0},
        {"policy_loss_coef": 0.3, "value_loss_coef": 2.0},
        {"value_loss_coef": 0.0},
        {"policy_loss_coef": 0.0},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 0.01},
        {"gae_lambda": 0.0},
        {"gae_lambda": 1.0, "gamma": 1.0},
        {"gamma": 0.0},
        {"optimizer": {"_target_": "torch.optim.Adam"}},
        {"optimizer": {"_target_": "torch.optim.RMSprop", "alpha": 0.5, "eps": 1e-3}},
    ],
    ids=str,
)
def test_every_setting_counts(settings):
    """Each coefficient, bound and optimizer has the effect of its definition."""
    compare(make_problem("gaussian"), make_config(**settings))


def test_state_dependent_and_squashed_scales_move():
    """Other distributions learn as well: a good action becomes more likely."""
    for family in ("squashed_gaussian", {"name": "diagonal_gaussian", "state_dependent_std": True}):
        model, _, rollout, _ = make_problem("gaussian", distributions={"Box": family})
        learner = A2CLearner(model, make_config(entropy_coef=0.0, value_loss_coef=0.0, lr=1e-3))
        obs, actions = rollout.obs[:-1], rollout.actions
        weights = learner.preprocess("default", rollout, Statistics()).whole().advantages
        before = log_probs(model, obs, actions)
        learner.update(rollout, Progress())
        after = log_probs(model, obs, actions)
        assert float(((after - before) * weights).mean()) > 0.0


@torch.no_grad()
def log_probs(model, obs, actions):
    """Log-probabilities of all actions, `[N]`."""
    return model.distribution.log_prob(model.policy_params(obs), actions).flatten()


class OwnLoss(A2CLearner):
    """A learner of a user that changes the loss."""

    factor, decay = 1.0, 0.0

    def compute_loss_for_module(self, module_id, batch, statistics):
        loss = self.factor * super().compute_loss_for_module(module_id, batch, statistics)
        if self.decay:
            params = self.modules[module_id].parameters()
            loss = loss + self.decay * sum(p.square().sum() for p in params)
        return loss


PLAIN = {"optimizer": {"_target_": "torch.optim.SGD"}, "max_grad_norm": 0.0}


def test_a_term_that_was_added_to_the_loss_counts():
    """A user may add a term to the loss: its gradient is added to the others."""
    model, reference, rollout, action_space = make_problem("discrete")
    config = make_config(**PLAIN)
    learner, before = OwnLoss(model, config), snapshot(model)
    learner.decay = 0.5
    learner.update(rollout, Progress())
    slow_update(reference, rollout, action_space, config, ALL, Coefficients(0.01, 0.02))
    with torch.no_grad():
        for name, param in reference.named_parameters():
            param.sub_(0.01 * before[name])
    assert_same_weights(model, reference, before)


def test_schedules_are_read_before_the_step():
    """Half way through, learning rate and entropy weight have half of their size."""
    config = make_config(
        lr=Schedule(start=0.02, end=0.0), entropy_coef=Schedule(start=0.5, end=0.25)
    )
    now = Coefficients(lr=0.01, entropy=0.375)
    row = compare(make_problem("discrete"), config, progress=Progress(fraction=0.5), now=now)
    assert row["train/entropy_coef"] == 0.375
    assert row["train/learning_rate"] == 0.01


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize(
    "optimizer",
    [
        {"_target_": "torch.optim.RMSprop"},
        {"_target_": "torch.optim.SGD", "weight_decay": 0.5, "momentum": 0.5},
        {"_target_": "torch.optim.Adam", "weight_decay": 0.5},
    ],
    ids=["rmsprop", "sgd", "adam"],
)
def test_burn_in_trains_the_critic_alone(optimizer, shared):
    """In the first epochs the policy stays bit for bit and the critic learns; then both do.

    Neither weight decay nor moments move the policy, which starts as if nothing had been before.
    """
    config = make_config(critic_burn_in_epochs=2, value_loss_coef=1.0, optimizer=optimizer)
    model, reference, rollout, action_space = make_problem("gaussian", shared_trunk=shared)
    learner, before = A2CLearner(model, config), snapshot(model)
    row = learner.update(rollout, Progress(updates=2 * config.epoch_length - 1)).reduce()
    now = Coefficients(lr=0.01, entropy=0.02)
    slow_update(reference, rollout, action_space, config, ALL, now, critic_only=True)
    assert_same_weights(model, reference, before)
    assert "train/policy_loss" not in row
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) is name.startswith("policy.")
    learner.update(rollout, Progress(updates=2 * config.epoch_length))
    slow_update(reference, rollout, action_space, config, ALL, now)
    assert_same_weights(model, reference, before)
    assert not any(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("name", ["gaussian", "dict_obs"])
def test_frozen_parameters_stay(name):
    """Parameters that need no gradient keep their values; the others learn as ever."""
    model, reference, rollout, action_space = make_problem(name)
    for net in (model, reference):
        for param in list(net.policy.parameters())[:2]:
            param.requires_grad_(False)
    config, before = make_config(max_grad_norm=0.0), snapshot(model)
    A2CLearner(model, config).update(rollout, Progress())
    slow_update(reference, rollout, action_space, config, ALL, Coefficients(0.01, 0.02))
    assert_same_weights(model, reference, before)
    frozen = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert len(frozen) == 2


def test_statistics_are_those_of_the_update():
    """Losses, values and returns in the row are means over the rollout before the step."""
    model, _, rollout, _ = make_problem("discrete")
    learner = A2CLearner(model, make_config())
    with torch.no_grad():
        values = model.values(rollout.obs[:-1])
    row = learner.update(rollout, Progress()).reduce()
    assert row["train/values_mean"] == pytest.approx(float(values.mean()), rel=1e-9)
    assert row["train/gradient_steps"] == 1.0
    assert 0.0 < row["train/policy_entropy"] <= torch.log(torch.tensor(3.0)).item()
    expected = {"policy_loss", "value_loss", "grad_norm", "explained_variance", "returns_mean"}
    assert expected <= {key.removeprefix("train/") for key in row}


def test_the_policy_starts_with_ordinary_steps_after_burn_in():
    """No step of Adam is longer than its learning rate, also the first ones after the burn-in."""
    config = make_config(
        optimizer={"_target_": "torch.optim.Adam"},
        lr=0.01,
        max_grad_norm=0.0,
        critic_burn_in_epochs=1,
        epoch_length=200,
    )
    model, _, rollout, _ = make_problem("discrete")
    learner = A2CLearner(model, config)
    longest = []
    for update in range(204):
        before = [param.detach().clone() for param in model.policy.parameters()]
        learner.update(rollout, Progress(updates=update, epoch=update // 200))
        after = [param.detach() for param in model.policy.parameters()]
        longest.append(max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)))
    assert longest[:200] == [0.0] * 200
    assert 0.0 < max(longest[200:]) <= 0.01 * 1.01
