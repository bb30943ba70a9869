"""Updates of A2C, PPO and IMPALA match a slow reference in float64."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import everyday, sweep
from gymnasium import spaces
from reference_actor_critic import Critic, SlowLearner
from step_ends import with_gaps
from torch import nn
from update_problems import (
    BOX,
    LEARNERS,
    LR,
    PROBLEMS,
    B,
    N,
    T,
    assert_same_weights,
    compare,
    make_learner,
    make_model,
    make_problem,
    make_rollout,
    normal,
    orders,
    replayed,
    snapshot,
    with_ignored,
    with_others,
)

from maze_train.core.events import Statistics
from maze_train.core.targets import TARGET, InlineObject
from maze_train.learner.config import Progress, Schedule
from maze_train.nets.config import ObservationNormalizationConfig, RecurrentConfig

pytestmark = pytest.mark.usefixtures("float64")
EVERY = pytest.mark.parametrize("algorithm", LEARNERS)
TRANSFORM = {"_target_": "maze_train.ReduceScaleValueTransform", "epsilon": 0.01}
SGD, ADAM, RMSPROP = ({"_target_": f"torch.optim.{name}"} for name in ("SGD", "Adam", "RMSprop"))
RMSPROP_TF = {"_target_": "maze_train.RMSpropTF", "alpha": 0.75, "eps": 0.125, "momentum": 0.5}


@EVERY
@pytest.mark.parametrize("name", everyday(2, PROBLEMS))
@sweep("shared", [False, True])
@sweep("ignoring", [False, True])
def test_es_update_matches_the_reference(algorithm, name, ignoring, shared):
    """Weights match the papers in every space, with all kinds of episode ends."""
    problem = make_problem(name, ignoring, shared_trunk=shared)
    row, ratios = compare(algorithm, problem, updates=1 if algorithm == "ppo" else 2)
    assert len(ratios) == N - 4 * ignoring
    if algorithm == "ppo":
        assert row["train/clip_fraction"] > 0.0, "a test without clipped ratios shows little"
    if algorithm == "impala":
        assert min(ratios.values()) < 0.5 < 2.0 < max(ratios.values())


A2C = [
    {"normalize_advantage": True},
    {"policy_loss_coef": 0.3, "value_loss_coef": 2.0},
    {"value_loss_coef": 0.0},
    {"policy_loss_coef": 0.0},
    {"max_grad_norm": 0.01},
    {"gae_lambda": 0.0},
    {"gae_lambda": 1.0, "gamma": 1.0},
    {"gamma": 0.0},
    {"optimizer": ADAM},
    {"optimizer": {**RMSPROP, "alpha": 0.5, "eps": 0.0078125}},
]
PPO = [
    {"normalize_advantage": False},
    {"value_clip_range": 0.05},
    {"recompute_advantages": True},
    {"recompute_advantages": True, "value_clip_range": 0.05},
    {"clip_range": 0.01},
    {"entropy_coef": 0.0, "max_grad_norm": 0.0},
    {"batch_size": N},
    {"batch_size": 1, "n_optimization_epochs": 1},
    {"batch_size": N - 1},  # the last minibatch is one sample, whose advantage is not normalised
    {"optimizer": {**SGD, "momentum": 0.9}},
]
IMPALA = [
    {"vtrace_clip_rho_threshold": None},
    {"vtrace_clip_pg_rho_threshold": None},
    {"vtrace_clip_rho_threshold": None, "vtrace_clip_pg_rho_threshold": None},
    {"vtrace_clip_rho_threshold": 1.5, "vtrace_clip_pg_rho_threshold": 0.75},
    {"vtrace_clip_rho_threshold": 0.5},
    {"gae_lambda": 0.0},
    {"gae_lambda": 1.0, "gamma": 1.0},
    {"loss_reduction": "sum"},
    {"loss_reduction": "sum", "max_grad_norm": 0.0, "optimizer": RMSPROP_TF},
    {"normalize_advantage": True},
    {"loss_reduction": "sum", "max_grad_norm": 40.0, "normalize_advantage": True},
    {"loss_reduction": "sum", "optimizer": SGD},
    {"optimizer": RMSPROP_TF},
]


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (algorithm, settings)
        for algorithm, table in (("a2c", A2C), ("ppo", PPO), ("impala", IMPALA))
        for settings in table
    ],
    ids=str,
)
def test_es_settings_match_the_reference(algorithm, settings):
    """Coefficients, bounds, thresholds and optimizers match the reference."""
    updates = 1 if algorithm == "ppo" else 2
    row, _ = compare(algorithm, make_problem("gaussian"), updates=updates, **settings)
    assert not any(math.isnan(value) for value in row.values())


@EVERY
@pytest.mark.parametrize("support", [None, [-3, 3]])
@pytest.mark.parametrize("transform", [None, TRANSFORM])
def test_transformed_and_categorical_critics(algorithm, transform, support):
    """Values are decoded to compute targets, and targets are encoded for the loss.

    Value clipping uses the scale of the targets.
    """
    problem = make_problem(value_transform=transform, value_support=support)
    critic = Critic(0.01 if transform else None, tuple(support) if support else None)
    clip = {"value_clip_range": 0.05} if algorithm == "ppo" and not support else {}
    row, _ = compare(algorithm, problem, critic, **clip)
    assert row["train/value_loss"] > 0.0


@pytest.mark.parametrize("role", ["policy", "trunk"])
@pytest.mark.parametrize("net", ["OwnNet", "OwnTemplate"])
def test_own_networks_get_the_same_update(net, role):
    """User-defined networks get the gradients of their forward pass."""
    settings = {role: {"_target_": f"update_problems.{net}"}, "shared_trunk": role == "trunk"}
    row, _ = compare("ppo", make_problem("gaussian", **settings))
    assert row["train/clip_fraction"] > 0.0


@EVERY
def test_illegal_actions_have_no_part(algorithm):
    """Masked log-probabilities and entropies only cover legal actions."""
    space = spaces.Dict({"x": BOX, "action_mask": spaces.MultiBinary(3)})
    model, rollout = (make(space, spaces.Discrete(3)) for make in (make_model, make_rollout))
    masks = normal(T + 1, B, 3) > 0
    masks[:-1].scatter_(2, rollout.actions.unsqueeze(2), True)
    masks[-1] = True
    assert 0.1 < masks.float().mean() < 0.9
    rollout = replace(
        rollout,
        obs={**rollout.obs, "action_mask": masks},
        final_obs={**rollout.final_obs, "action_mask": torch.ones_like(masks[0, :2])},
    )
    assert len(rollout.final_positions) == 2
    compare(algorithm, (model, with_others(model, rollout), spaces.Discrete(3)))


@EVERY
def test_schedules_are_read_before_the_update(algorithm):
    """Learning rate, entropy coefficient and clip range follow progress, updates and steps."""
    settings = {
        "lr": Schedule(start=2 * LR[algorithm], end=0.0),
        "entropy_coef": Schedule(points=[[0, 0.5], [10, 0.0]], by="updates"),
    }
    now = {"lr": LR[algorithm], "entropy_coef": 0.25}
    if algorithm == "ppo":
        settings["clip_range"] = Schedule(points=[[0, 0.2], [1000, 0.1]], by="env_steps")
        now["clip_range"] = 0.2 + 0.5 * (0.1 - 0.2)
    progress = Progress(env_steps=500, updates=5, fraction=0.5)
    row, _ = compare(algorithm, make_problem(), progress=progress, now=now, **settings)
    names = {"lr": "learning_rate", "entropy_coef": "entropy_coef", "clip_range": "clip_range"}
    assert {key: row[f"train/{names[key]}"] for key in now} == pytest.approx(now)


@pytest.mark.parametrize(("shared", "left_out"), [(False, 0), (True, 1)])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("a2c", {"optimizer": RMSPROP}),
        ("a2c", {"optimizer": {**SGD, "weight_decay": 0.5, "momentum": 0.5}}),
        ("a2c", {"optimizer": {**ADAM, "weight_decay": 0.5}}),
        ("ppo", {"target_kl": 1e-9}),
    ],
    ids=str,
)
def test_burn_in_trains_the_critic_alone(algorithm, settings, shared, left_out):
    """During burn-in only the critic learns, and the policy stays bit-for-bit identical.

    Afterwards both learn, also if a queue drops the first update after burn-in. Weight decay and
    moments do not move the frozen policy, and its optimizer state starts empty. The critic keeps
    its moments.
    """
    model, rollout, action_space = make_problem("gaussian", shared_trunk=shared)
    reference, before = copy.deepcopy(model), snapshot(model)
    rollout = replace(rollout, log_probs=rollout.log_probs if algorithm == "impala" else None)
    learner = make_learner(algorithm, model, critic_burn_in_epochs=2, **settings)
    config, generator = learner.config, torch.Generator().manual_seed(7)
    slow = SlowLearner(reference, action_space, config)
    for progress in (2 * config.epoch_length - 1, 2 * config.epoch_length + left_out):
        is_first = progress < 2 * config.epoch_length
        row = learner.update(rollout, Progress(updates=progress)).reduce()
        _, steps = slow.update(rollout, orders(slow, rollout, generator), is_first)
        assert_same_weights(model, reference, before)
        assert row["train/gradient_steps"] == steps
        assert ("train/policy_loss" in row) is not is_first
        stays = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
        policy = {name for name in before if name.startswith("policy.")}
        assert stays == (policy if is_first else set())


class Chancy(nn.Module):
    """Critic with dropout."""

    def __init__(self, observation_space, output_size):
        super().__init__()
        size = observation_space.shape[0]
        self.layers = nn.Sequential(nn.Linear(size, 9), nn.Dropout(0.5), nn.Linear(9, output_size))

    def forward(self, obs):
        return self.layers(obs)


def test_recomputed_advantages_use_evaluation_mode():
    """Advantages are recomputed in evaluation mode, also between minibatches in training mode."""
    model, rollout, _ = make_problem("gaussian", critic={TARGET: InlineObject(Chancy)})
    learner = make_learner("ppo", model, recompute_advantages=True)
    prepared = learner.preprocess("default", rollout, Statistics())
    model.train()
    again = learner.with_new_advantages("default", prepared)
    assert model.training
    torch.testing.assert_close(again.whole().advantages, prepared.whole().advantages)


# -- memory --------------------------------------------------------------------------------------


def memory_problem(name, cell, ignoring, algorithm):
    """Return a recurrent policy, its rollout and its action space.

    The hidden states after the first row are random for IMPALA, which ignores them.
    """
    model = make_model(*PROBLEMS[name], rnn=RecurrentConfig(cell=cell, size=5))
    rollout = make_rollout(*PROBLEMS[name])
    states = 0.7 * normal(T + 1, B, model.state_size)
    rollout = replace(rollout, hidden_states=states, log_probs=normal(T, B) - 1.5)
    rollout = with_ignored(rollout) if ignoring else rollout
    for t in range(T if algorithm != "impala" else 0):
        obs = {k: x[t] for k, x in rollout.obs.items()} if name == "dict_obs" else rollout.obs[t]
        with torch.no_grad():
            _, after = model.policy_step(obs, states[t])
        states[t + 1] = torch.where(rollout.end[t].bool().unsqueeze(1), 0.0, after)
    return model, rollout, PROBLEMS[name][1]


@EVERY
@pytest.mark.parametrize(
    ("name", "cell"), everyday(1, [("discrete", "lstm"), ("dict_obs", "gru")], are_rows=True)
)
@sweep("ignoring", [False, True])
@sweep("length", [0, 1, 3])
def test_recurrent_updates_match_the_reference(algorithm, name, cell, ignoring, length):
    """Values, ratios and gradients match; gradients flow within sequences, not across episodes.

    PPO shuffles sequences; IMPALA unrolls its networks from the first row.
    """
    more = {"batch_size": 6, "recompute_advantages": True} if algorithm == "ppo" else {}
    problem = memory_problem(name, cell, ignoring, algorithm)
    _, ratios = compare(algorithm, problem, sequence_length=length, **more)
    assert len(ratios) == N - 4 * ignoring


def test_sequences_are_split_by_n_minibatches():
    """9 sequences of 2 steps are split into 4 minibatches of 3, 2, 2 and 2 sequences."""
    problem = memory_problem("discrete", "gru", False, "ppo")
    row, _ = compare("ppo", problem, sequence_length=2, n_minibatches=4)
    assert row["train/gradient_steps"] == 8


def test_impala_uses_the_first_hidden_state():
    """The update of IMPALA depends on the hidden state of the first row."""
    moved = []
    for scale in (1.0, -1.0):
        model, rollout, _ = memory_problem("discrete", "lstm", False, "impala")
        rollout.hidden_states[0] *= scale
        make_learner("impala", model).update(rollout, Progress())
        moved.append(snapshot(model))
    assert any(not torch.equal(moved[0][name], moved[1][name]) for name in moved[0])


# -- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "memory"),
    [*((name, None) for name in LEARNERS), ("impala", RecurrentConfig(cell="gru", size=5))],
)
@sweep("variant", ["plain", "ignoring", "replayed"])
def test_observation_statistics_are_updated_after_the_update(algorithm, memory, variant):
    """An update uses the previous statistics, then adds each transition once.

    IMPALA does not add replayed transitions again.
    """
    running = ObservationNormalizationConfig(mode="running", clip=1.5)
    model = make_model(*PROBLEMS["discrete"], normalization=running, rnn=memory)
    seen = 2.0 + 3.0 * normal(11, 4, seed=3)
    model.normalizer.update(seen)
    rollout = replace(make_rollout(*PROBLEMS["discrete"]), log_probs=normal(T, B) - 1.0)
    if memory is not None:
        rollout = replace(rollout, hidden_states=normal(T + 1, B, model.state_size))
    new = rollout.obs[:-1]
    if variant == "ignoring":
        rollout = with_ignored(rollout)
        new = new[rollout.valid]
    elif variant == "replayed" and algorithm == "impala":
        rollout, new = replayed(rollout), new[:, : B - 1]
    compare(algorithm, (model, rollout, spaces.Discrete(3)))
    known = np.concatenate([seen.numpy(), new.reshape(-1, 4).numpy()])
    assert float(model.normalizer.count) == len(known)
    np.testing.assert_allclose(model.normalizer.mean.numpy(), known.mean(0), rtol=1e-12)
    np.testing.assert_allclose(model.normalizer.var.numpy(), known.var(0), rtol=1e-12)


# -- nothing to learn ----------------------------------------------------------------------------


@EVERY
@sweep("mode", ["none", "running"])
def test_update_without_transitions_changes_nothing(algorithm, mode):
    """An update without transitions changes no weights and no statistics and raises no error."""
    settings = {"normalization": ObservationNormalizationConfig(mode=mode)}
    model, rollout, _ = make_problem(**settings)
    before = copy.deepcopy(model.state_dict())
    nothing = with_gaps(rollout, torch.ones_like(rollout.terminated))
    row = make_learner(algorithm, model).update(nothing, Progress()).reduce()
    assert all(np.isfinite(value) for value in row.values())
    assert row["train/gradient_steps"] == 0
    assert "train/rho_mean" not in row
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
