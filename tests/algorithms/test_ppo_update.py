"""PPO: passes over shuffled minibatches, and early stopping."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from step_ends import with_gaps
from update_problems import (
    B,
    N,
    T,
    assert_same_weights,
    compare,
    make_config,
    make_learner,
    make_problem,
    snapshot,
)

from maze_train import ConfigError, PPOAlgorithmConfig, PPOLearner, Progress, Statistics
from maze_train.core.targets import InlineObject

pytestmark = pytest.mark.usefixtures("float64")


class Recorder(PPOLearner):
    """Learner that records log-ratios and samples of every minibatch."""

    def __init__(self, *args, **kwargs):
        self.log_ratios, self.rows = [], []
        super().__init__(*args, **kwargs)

    def policy_loss(self, log_probs, advantages, batch, config, statistics):
        self.log_ratios.append((log_probs - batch.old_log_probs).detach().clone())
        self.rows.append(batch.obs[:, 0].tolist())
        return super().policy_loss(log_probs, advantages, batch, config, statistics)


def recorded(**settings):
    """Return a recorder after one update, and its rollout."""
    model, rollout, _ = make_problem("gaussian")
    learner = Recorder(model, make_config("ppo", **settings))
    learner.update(replace(rollout, log_probs=None), Progress())
    return learner, rollout


@pytest.mark.parametrize(("target_kl", "low", "high"), [(1e-6, 1, 1), (0.004, 2, 5), (1e9, 6, 6)])
def test_target_kl_stops_before_the_step(target_kl, low, high):
    """Passes end before the step of the first minibatch whose KL estimate is too large.

    The next update runs new passes.
    """
    settings = {"target_kl": target_kl, "batch_size": 6, "lr": 0.01}
    row, _ = compare("ppo", make_problem(), updates=3, **settings)
    assert low <= row["train/gradient_steps"] <= high


class Rates(Recorder):
    """Learner that records the learning rate of every step."""

    def __init__(self, *args, **kwargs):
        self.rates = []
        super().__init__(*args, **kwargs)

    def apply_gradients(self, optimizers, skip):
        self.rates.append(list(map(float, optimizers[0].rates)))
        super().apply_gradients(optimizers, skip)


ADAPTIVE = {"adaptive_kl": 0.0078125, "start": 0.0625, "min": 0.03125, "max": 0.125}


@pytest.mark.parametrize(
    ("updates", "start", "settings"),
    [
        (4, 0.0625, {}),
        (3, 0.03125, {"lr_factors": {"critic": 0.5}}),
        (3, 0.125, {"gradient_accumulation": 2, "n_minibatches": 4}),
    ],
)
def test_learning_rate_follows_the_kl_divergence(updates, start, settings):
    """The rate may change by a factor of 1.5 once per step, except the first of an update.

    The reference computes all rates from the log-ratios, as the definition says.
    """
    model, rollout, _ = make_problem("gaussian")
    given = {"lr": {**ADAPTIVE, "start": start}, "batch_size": 6, "n_optimization_epochs": 4}
    learner = Rates(model, make_config("ppo", **{**given, **settings}), seed=3)
    gathered, rate, expected = learner.config.gradient_accumulation, start, []
    for _ in range(updates):
        learner.log_ratios.clear()
        row = learner.update(replace(rollout, log_probs=None), Progress()).reduce()
        for number, x in enumerate(learner.log_ratios):
            divergence = float((x.exp() - 1.0 - x).mean())
            is_due = number >= gathered and number % gathered == 0
            if is_due and divergence > 2 * ADAPTIVE["adaptive_kl"]:
                rate = max(ADAPTIVE["min"], rate / 1.5)
            elif is_due and divergence < ADAPTIVE["adaptive_kl"] / 2:
                rate = min(ADAPTIVE["max"], rate * 1.5)
            if number % gathered == gathered - 1:
                expected.append(rate)
        assert row["train/learning_rate"] == rate
    assert [rates[0] for rates in learner.rates] == expected
    assert {a < b for a, b in pairwise(expected) if a != b} == {False, True}
    assert {ADAPTIVE["min"], ADAPTIVE["max"]} & set(expected)
    if "lr_factors" in settings:
        assert all(rates[1] == 0.5 * rates[0] for rates in learner.rates)


def test_learning_rates_of_modules_are_separate():
    """Each module's learning rate follows its KL divergence; a constant rate does not change."""
    models = {name: make_problem("gaussian")[0] for name in ("fast", "slow", "plain")}
    rollout = replace(make_problem("gaussian")[1], log_probs=None)
    own = {"slow": {"lr": {**ADAPTIVE, "adaptive_kl": 100.0}}, "plain": {"lr": 0.0625}}
    learner = make_learner("ppo", models, lr=ADAPTIVE, batch_size=N, overrides=own)
    row = learner.update(dict.fromkeys(models, rollout), Progress()).reduce()
    rates = [row[f"train/{name}/learning_rate"] for name in models]
    assert rates == [0.0625 / 1.5, 0.0625 * 1.5, 0.0625]


def wide(learner, module_id, batch, statistics):
    """Return a loss that rewards or penalizes entropy, depending on `learner.sign`."""
    model = learner.modules[module_id]
    return -learner.sign * model.distribution.entropy(model.policy_params(batch.obs)).mean()


@pytest.mark.parametrize("name", ["gaussian", "dict_action"])
def test_free_log_std_leaves_its_limit(name):
    """Large steps stop at the limits of the std, and the first step back leaves a limit."""
    limits = {"name": "diagonal_gaussian", "log_std_min": -0.5, "log_std_max": 0.0}
    model, rollout, _ = make_problem(name, distributions={"Box": limits})
    learner = make_learner("ppo", model, lr=0.25, loss_function={"_target_": InlineObject(wide)})
    for sign, end in ((1.0, 0.0), (-1.0, -0.5), (1.0, 0.0)):
        learner.sign = sign
        for _ in range(4):
            learner.update(replace(rollout, log_probs=None), Progress())
        assert model.policy.free_params.tolist() == [end] * 2


class Plain(PPOLearner):
    """Learner with a custom policy loss."""

    def policy_loss(self, log_probs, advantages, batch, config, statistics):
        return -(log_probs * advantages).mean()


def test_custom_policy_loss_keeps_target_kl_and_metrics():
    """`target_kl` ends the passes, and KL divergence and clip fraction are reported."""
    model, rollout, _ = make_problem()
    learner = Plain(model, make_config("ppo", target_kl=1e-6, batch_size=6, lr=0.01))
    row = learner.update(replace(rollout, log_probs=None), Progress()).reduce()
    assert row["train/gradient_steps"] == 1
    assert row["train/approximate_kl"] > 0.0
    assert 0.0 <= row["train/clip_fraction"] <= 1.0


def test_only_the_first_minibatch_has_ratios_of_one():
    """Only the first minibatch of an update has ratios of 1."""
    learner, _ = recorded()
    assert float(learner.log_ratios[0].abs().max()) < 1e-12
    assert all(float(x.abs().max()) > 1e-4 for x in learner.log_ratios[1:])


def test_ratios_use_recorded_log_probs():
    """Recorded log-probabilities are used, because the acting policy may be older."""
    model, rollout, _ = make_problem("gaussian")
    older = torch.linspace(-3.0, 1.0, N, dtype=torch.float64)
    learner = make_learner("ppo", model)
    given = replace(rollout, log_probs=older.view(T, B))
    prepared = learner.preprocess("default", given, Statistics())
    assert torch.equal(prepared.old_log_probs, older)
    prepared = learner.preprocess("default", replace(rollout, log_probs=None), Statistics())
    assert float(prepared.old_log_probs.sub(older).abs().min()) > 0.0


@pytest.mark.parametrize(("batch_size", "passes"), [(4, 1), (7, 3), (N, 3)])
def test_every_sample_appears_once_per_pass(batch_size, passes):
    """Each pass is a different permutation of all samples."""
    learner, rollout = recorded(batch_size=batch_size, n_optimization_epochs=passes)
    rows = [x for minibatch in learner.rows for x in minibatch]
    samples = sorted(rollout.obs[:T, :, 0].flatten().tolist())
    assert len(set(samples)) == N == T * B
    cut = [rows[k * N : (k + 1) * N] for k in range(passes)]
    assert all(sorted(order) == samples for order in cut)
    assert len({tuple(order) for order in cut}) == passes
    assert len(rows) == passes * N


@pytest.mark.parametrize("count", [1, 4, N])
def test_n_minibatches_differ_in_size_by_at_most_one(count):
    """18 samples are split into 4 minibatches of 5, 5, 4 and 4; `batch_size` is ignored."""
    settings = {"n_minibatches": count, "n_optimization_epochs": 3, "batch_size": 5}
    row, _ = compare("ppo", make_problem(), **settings)
    assert row["train/gradient_steps"] == 3 * count
    learner, _ = recorded(**settings)
    sizes = [len(rows) for rows in learner.rows]
    assert sizes == 3 * {1: [N], 4: [5, 5, 4, 4], N: [1] * N}[count]


def test_no_minibatch_is_empty():
    """A rollout with fewer transitions than `n_minibatches` has one minibatch per transition."""
    model, rollout, _ = make_problem()
    gaps = torch.ones(T, B, dtype=torch.bool)
    gaps[2, :2] = False
    learner = make_learner("ppo", model, n_minibatches=N, n_optimization_epochs=1)
    row = learner.update(with_gaps(rollout, gaps), Progress()).reduce()
    assert row["train/gradient_steps"] == 2


@pytest.mark.parametrize(("settings", "count"), [({}, 7), ({"sequence_length": 16}, 2)])
def test_fast_dev_run_limits_n_minibatches(settings, count):
    """A dry run has at most one minibatch per sequence of its short rollout."""
    config = PPOAlgorithmConfig(n_rollout_steps=32, n_minibatches=7, **settings)
    trial = config.shortened()
    assert trial.n_minibatches == min(count, trial.n_rollout_steps // (trial.sequence_length or 1))
    trial.check_concurrency(1)


def test_modules_update_as_if_alone():
    """Each module gets the same update as alone; a module without transitions does not change."""
    names = ("discrete", "gaussian", "dict_obs")
    problems = {name: make_problem(name) for name in names}
    rollouts = {name: rollout for name, (_, rollout, _) in problems.items()}
    gaps = torch.ones(T, B, dtype=torch.bool)
    rollouts["dict_obs"] = with_gaps(rollouts["dict_obs"], gaps)
    before = snapshot(problems["dict_obs"][0])
    settings = {"batch_size": N, "max_grad_norm": 0.0}
    together = {name: model for name, (model, *_) in problems.items()}
    make_learner("ppo", together, **settings).update(rollouts, Progress())
    for name in names[:2]:
        alone, rollout, _ = make_problem(name)
        make_learner("ppo", alone, **settings).update(rollout, Progress())
        assert_same_weights(together[name], alone)
    for name, param in together["dict_obs"].named_parameters():
        assert torch.equal(param, before[name])


def test_target_kl_applies_per_module():
    """`target_kl` applies to each module separately, in any order of modules."""
    settings = {"target_kl": 0.001, "batch_size": N, "max_grad_norm": 0.0}
    rollout = replace(make_problem()[1], log_probs=None)

    def made(name):
        model = make_problem()[0]
        for param in model.policy.parameters():
            param.requires_grad_(name == "fast")
        return model

    alone, steps = {}, {}
    for name in ("fast", "slow"):
        alone[name] = made(name)
        row = make_learner("ppo", alone[name], **settings).update(rollout, Progress()).reduce()
        steps[name] = row["train/gradient_steps"]
    assert steps["fast"] < steps["slow"]
    for order in (("fast", "slow"), ("slow", "fast")):
        models = {name: made(name) for name in order}
        learner = make_learner("ppo", models, **settings)
        row = learner.update({name: rollout for name in order}, Progress()).reduce()
        assert row["train/gradient_steps"] == steps["slow"]
        for name, model in models.items():
            assert_same_weights(model, alone[name])


def test_reward_scaling_ignores_invalid_rows():
    """Rewards of ignored rows do not affect the columns of transitions."""
    model, rollout, _ = make_problem(ignoring=True)
    spoiled = replace(rollout, rewards=torch.where(rollout.valid, rollout.rewards, 1e30))
    columns = []
    for one in (rollout, spoiled):
        learner = make_learner("ppo", model, reward_scaling=True)
        columns.append(learner.preprocess("default", one, Statistics()).whole().columns)
    for name, column in columns[0].items():
        assert torch.equal(column, columns[1][name])


def test_value_clipping_with_categorical_critic_raises():
    """Value clipping with a categorical critic raises ConfigError."""
    model = make_problem(value_support=[-3, 3])[0]
    with pytest.raises(ConfigError, match=r"algorithm\.value_clip_range = 0\.2.*value_support"):
        make_learner("ppo", model, value_clip_range=0.2)
