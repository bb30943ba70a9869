from __future__ import annotations

import math

import pytest
import torch
from reference_actor_critic import Coefficients, Critic, slow_update
from update_problems import (
    PROBLEMS,
    SETTINGS,
    B,
    N,
    T,
    assert_same_weights,
    make_problem,
    snapshot,
)

from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.errors import ConfigError
from maze_train.learner.config import Progress, Schedule

SUPPORT = [-3, 3]
TRANSFORM = {"_target_": "maze_train.ReduceScaleValueTransform", "epsilon": 0.01}
LR, SEED = 0.05, 7


@pytest.fixture(autouse=True)
def _float64():
    """Everything in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Recorder(PPOLearner):
    """Remembers log-ratios and samples of every minibatch."""

    def __init__(self, *args, **kwargs):
        self.log_ratios, self.rows = [], []
        super().__init__(*args, **kwargs)

    def policy_loss(self, log_probs, advantages, batch, statistics):
        self.log_ratios.append((log_probs - batch.old_log_probs).detach().clone())
        self.rows.append(batch.obs[:, 0].tolist())
        return super().policy_loss(log_probs, advantages, batch, statistics)


def make_config(**settings):
    """Settings whose numbers are exact in float32; steps long enough for ratios to be clipped."""
    defaults = {"lr": LR, "entropy_coef": 0.02, "batch_size": 8, "n_optimization_epochs": 2}
    return PPOAlgorithmConfig(**{**SETTINGS, **defaults, **settings})


def orders(config, num_samples=N):
    """The minibatches of each pass: a permutation from the learner's generator, cut in pieces."""
    generator = torch.Generator().manual_seed(SEED)
    return [
        [
            piece.tolist()
            for piece in torch.randperm(num_samples, generator=generator).split(config.batch_size)
        ]
        for _ in range(config.n_optimization_epochs)
    ]


def compare(problem, config, critic=None, progress=None, now=None):
    """Update model and reference alike, compare all weights, return the statistics."""
    model, reference, rollout, action_space = problem
    before = snapshot(model)
    learner = PPOLearner(model, config, seed=SEED)
    row = learner.update(rollout, progress or Progress()).reduce()
    now = now or Coefficients(LR, config.entropy_coef, config.clip_range)
    steps = slow_update(reference, rollout, action_space, config, orders(config), now, critic)
    assert row["train/gradient_steps"] == steps
    assert_same_weights(model, reference, before)
    return row


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_update_equals_the_reference(name, shared):
    """Two passes in shuffled minibatches give the weights of the definitions, in every space."""
    row = compare(make_problem(name, shared_trunk=shared), make_config())
    assert row["train/clip_fraction"] > 0.0, "a test without clipped ratios shows little"


@pytest.mark.parametrize(
    "settings",
    [
        {"normalize_advantage": False},
        {"value_clip_range": 0.05},
        {"recompute_advantages": True},
        {"recompute_advantages": True, "value_clip_range": 0.05},
        {"clip_range": 0.01},
        {"entropy_coef": 0.0, "max_grad_norm": 0.0},
        {"batch_size": N},
        {"batch_size": 1, "n_optimization_epochs": 1},
        {"policy_loss_coef": 0.2, "value_loss_coef": 3.0},
        {"optimizer": {"_target_": "torch.optim.SGD", "momentum": 0.9}},
    ],
    ids=str,
)
def test_every_setting_counts(settings):
    """Each setting has the effect of its definition."""
    compare(make_problem("gaussian"), make_config(**settings))


@pytest.mark.parametrize("support", [None, SUPPORT])
@pytest.mark.parametrize("transform", [None, TRANSFORM])
def test_transformed_and_categorical_critics(transform, support):
    """Values are decoded before advantages are taken; clipping is on the scale of the targets."""
    settings = {"value_transform": transform, "value_support": support}
    critic = Critic(0.01 if transform else None, tuple(support) if support else None)
    config = make_config(value_clip_range=0.0 if support else 0.05)
    compare(make_problem("discrete", **settings), config, critic)


@pytest.mark.parametrize("role", ["policy", "trunk"])
@pytest.mark.parametrize(
    "net",
    [
        "OwnNet",
        pytest.param("OwnTemplate"),
    ],
)
def test_own_networks_get_the_same_update(net, role):
    """A network of a user has the gradients of its own forward pass."""
    settings = {role: {"_target_": f"update_problems.{net}"}, "shared_trunk": role == "trunk"}
    compare(make_problem("gaussian", **settings), make_config())


@pytest.mark.parametrize("target_kl", [1e-6, 0.003, 0.005, 1e9])
def test_the_minibatch_that_moves_too_far_is_not_applied(target_kl):
    """Trap 11: passes end before the step of the first minibatch whose estimate is too large."""
    config = make_config(target_kl=target_kl, batch_size=6, lr=0.01)
    row = compare(make_problem("discrete"), config, now=Coefficients(0.01, 0.02, 0.2))
    possible = 2 * -(-N // 6)
    if target_kl == 1e-6:
        assert row["train/gradient_steps"] == 1
    elif target_kl == 1e9:
        assert row["train/gradient_steps"] == possible
    else:
        assert 1 < row["train/gradient_steps"] < possible


def test_a_stopped_update_does_not_stop_the_next():
    """Each update starts its passes anew."""
    model, _, rollout, _ = make_problem("discrete")
    learner = PPOLearner(model, make_config(target_kl=1e-6))
    for _ in range(3):
        assert learner.update(rollout, Progress()).reduce()["train/gradient_steps"] == 1


@pytest.mark.parametrize("name", ["discrete", "gaussian"])
def test_a_remainder_gives_no_nan(name):
    """Trap 8: the last minibatch may have one sample, whose advantage is not normalised."""
    config = make_config(batch_size=N - 1)
    assert [len(piece) for piece in orders(config)[0]] == [N - 1, 1]
    row = compare(make_problem(name), config)
    assert not any(math.isnan(value) for value in row.values())


def test_ratios_are_one_in_the_first_minibatch_only():
    """The first minibatch of a pass over several has ratios of 1, later ones have not."""
    model, _, rollout, _ = make_problem("gaussian")
    learner = Recorder(model, make_config())
    learner.update(rollout, Progress())
    assert float(learner.log_ratios[0].abs().max()) < 1e-12
    assert all(float(x.abs().max()) > 1e-4 for x in learner.log_ratios[1:])


@pytest.mark.parametrize("batch_size", [1, 4, 7, N])
@pytest.mark.parametrize("passes", [1, 3])
def test_every_sample_appears_once_per_pass(batch_size, passes):
    """Each pass is a permutation of all samples, each in a new order."""
    model, _, rollout, _ = make_problem("gaussian")
    config = make_config(batch_size=batch_size, n_optimization_epochs=passes)
    learner = Recorder(model, config)
    learner.update(rollout, Progress())
    rows = [x for minibatch in learner.rows for x in minibatch]
    samples = sorted(rollout.obs[:T, :, 0].flatten().tolist())
    assert len(set(samples)) == N == T * B
    cut = [rows[k * N : (k + 1) * N] for k in range(passes)]
    assert all(sorted(order) == samples for order in cut)
    assert len({tuple(order) for order in cut}) == passes
    assert len(rows) == passes * N


def test_schedules_are_read_before_the_update():
    """Clip range, learning rate and entropy weight follow progress, steps and updates."""
    config = make_config(
        lr=Schedule(start=0.1, end=0.0),
        clip_range=Schedule(points=[[0, 0.2], [1000, 0.1]], by="env_steps"),
        entropy_coef=Schedule(points=[[0, 0.5], [10, 0.0]], by="updates"),
    )
    progress = Progress(env_steps=500, updates=5, fraction=0.5)
    now = Coefficients(lr=0.05, entropy=0.25, clip=0.2 + 0.5 * (0.1 - 0.2))
    row = compare(make_problem("discrete"), config, progress=progress, now=now)
    assert row["train/clip_range"] == pytest.approx(0.15)
    assert row["train/entropy_coef"] == 0.25
    assert row["train/learning_rate"] == 0.05


def test_burn_in_trains_the_critic_alone():
    """While the critic burns in, all passes are made and the policy stays bit for bit."""
    config = make_config(critic_burn_in_epochs=1, value_loss_coef=1.0, target_kl=1e-9)
    model, reference, rollout, action_space = make_problem("gaussian")
    learner, before = PPOLearner(model, config, seed=SEED), snapshot(model)
    row = learner.update(rollout, Progress(epoch=0)).reduce()
    now = Coefficients(LR, 0.02, 0.2)
    plain = make_config(value_loss_coef=1.0)
    slow_update(reference, rollout, action_space, plain, orders(plain), now, critic_only=True)
    assert_same_weights(model, reference, before)
    assert row["train/gradient_steps"] == len(orders(plain)[0]) * 2
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) is name.startswith("policy.")


def test_the_seed_decides_the_order():
    """Equal seeds give equal weights, another seed other ones."""
    models = []
    for seed in (1, 1, 2):
        model, _, rollout, _ = make_problem("discrete")
        PPOLearner(model, make_config(), seed=seed).update(rollout, Progress())
        models.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_modules_learn_side_by_side():
    """Two policies in one learner get the update that each gets alone, sizes being equal."""
    problems = [make_problem(name) for name in ("discrete", "gaussian")]
    config = make_config(batch_size=N, max_grad_norm=0.0)
    both = PPOLearner({"a": problems[0][0], "b": problems[1][0]}, config)
    rollouts = {"a": problems[0][2], "b": problems[1][2]}
    both.update(rollouts, Progress())
    for key, (model, alone, rollout, _) in zip(rollouts, problems, strict=True):
        PPOLearner({key: alone}, config).update({key: rollout}, Progress())
        assert_same_weights(model, alone)


def test_the_policy_that_moves_most_stops_the_passes():
    """With several modules the largest estimate counts, whatever their order."""
    steps = []
    for order in (("fast", "slow"), ("slow", "fast")):
        models = {name: make_problem("discrete")[0] for name in order}
        rollout = make_problem("discrete")[2]
        for param in models["slow"].policy.parameters():
            param.requires_grad_(False)
        learner = PPOLearner(models, make_config(target_kl=0.001, batch_size=N))
        row = learner.update({name: rollout for name in order}, Progress()).reduce()
        steps.append(row["train/gradient_steps"])
    assert steps[0] == steps[1]


def test_batches_larger_than_the_rollout_are_refused():
    """Trap 9: the message names both sizes and the remedy."""
    config = make_config(batch_size=N + 1)
    config.check_concurrency(B + 1)
    with pytest.raises(ConfigError, match=rf"batch_size = {N + 1}: larger than .* {N} samples"):
        config.check_concurrency(B)


def test_value_clipping_needs_a_scalar_critic():
    """A categorical critic has no values to clip: the combination is refused, not ignored."""
    model = make_problem("discrete", value_support=[-3, 3])[0]
    with pytest.raises(ConfigError, match=r"algorithm\.value_clip_range = 0\.2.*value_support"):
        PPOLearner(model, make_config(value_clip_range=0.2))
