"""Updates of IMPALA against sums over episodes, in double precision."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import sweep
from gymnasium import spaces
from reference_actor_critic import Critic
from reference_impala import SlowImpala
from update_problems import (
    BOX,
    PROBLEMS,
    SETTINGS,
    B,
    N,
    T,
    assert_same_weights,
    make_model,
    make_rollout,
    snapshot,
)

from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.a2c.learner import A2CLearner
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.algorithms.impala.learner import ImpalaLearner
from maze_train.data.joining import join_rollouts, select_envs
from maze_train.errors import ShapeError, TrainingError
from maze_train.learner.config import Progress
from maze_train.nets.config import MemoryConfig, ObservationNormalizationConfig

DICT_ACTION = spaces.Dict({"gear": spaces.Discrete(3), "force": spaces.Box(-1, 1, (2,))})
EVERY = {**PROBLEMS, "dict_action": (BOX, DICT_ACTION)}
TRANSFORM = {"_target_": "maze_train.ReduceScaleValueTransform", "epsilon": 0.01}
RMSPROP_TF = {"_target_": "maze_train.RMSpropTF", "alpha": 0.75, "eps": 0.125, "momentum": 0.5}


@pytest.fixture(autouse=True)
def _float64():
    """Everything in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_config(**settings):
    """Settings whose numbers are exact in float32."""
    defaults = {**SETTINGS, "lr": 0.0078125, "entropy_coef": 0.03125}
    return ImpalaAlgorithmConfig(**{**defaults, **settings})


def normal(*shape, seed=5):
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def log_probs_of(model, rollout):
    """Log-probabilities of the actions under a model without a memory, `[T, B]`."""
    obs = {k: x[:-1] for k, x in rollout.obs.items()} if isinstance(rollout.obs, dict) else (
        rollout.obs[:-1]
    )  # fmt: skip
    with torch.no_grad():
        return model.distribution.log_prob(model.policy_params(obs), rollout.actions)


def with_others(rollout, log_probs):
    """The rollout of a policy that had other log-probabilities, up to a factor of about 5."""
    return replace(rollout, log_probs=log_probs + 0.8 * normal(T, B))


def make_problem(name="discrete", **settings):
    """Model, and a rollout of another policy; some ratios are above 1, others below."""
    model = make_model(*EVERY[name], **settings)
    rollout = make_rollout(*EVERY[name])
    return model, with_others(rollout, log_probs_of(model, rollout)), EVERY[name][1]


def with_ignored(rollout):
    """The rollout with rows that are no transitions, full of garbage.

    After a terminal step, after a truncated one, in the first row, and where an episode was lost.
    """
    ignored = torch.zeros(T, B, dtype=torch.bool)
    ignored[3, 0] = ignored[2, 1] = ignored[0, 2] = ignored[3, 2] = True
    assert not bool((ignored & rollout.ended).any())
    return replace(
        rollout,
        valid=~ignored,
        rewards=torch.where(ignored, 1e6, rollout.rewards),
        log_probs=torch.where(ignored, -1e3, rollout.log_probs),
    )


def compare(problem, config, critic=None, updates=2):
    """Updates of model and reference alike; returns the last statistics and importance weights."""
    model, rollout, action_space = problem
    reference, before = copy.deepcopy(model), snapshot(model)
    learner = ImpalaLearner(model, config)
    slow = SlowImpala(reference, action_space, config, critic)
    for _ in range(updates):
        row = learner.update(rollout, Progress()).reduce()
        ratios = slow.update(rollout)
    assert_same_weights(model, reference, before)
    return row, ratios


@pytest.mark.parametrize("name", EVERY)
@sweep("shared", [False, True])
@sweep("ignoring", [False, True])
def test_update_equals_the_reference(name, ignoring, shared):
    """Two updates give the weights that the paper gives, in every space, with any ending."""
    model, rollout, action_space = make_problem(name, shared_trunk=shared)
    rollout = with_ignored(rollout) if ignoring else rollout
    row, ratios = compare((model, rollout, action_space), make_config())
    assert row["train/gradient_steps"] == 1
    assert min(ratios.values()) < 0.5 < 2.0 < max(ratios.values())
    assert len(ratios) == N - 4 * ignoring


@pytest.mark.parametrize(
    "settings",
    [
        {"vtrace_clip_rho_threshold": None},
        {"vtrace_clip_pg_rho_threshold": None},
        {"vtrace_clip_rho_threshold": None, "vtrace_clip_pg_rho_threshold": None},
        {"vtrace_clip_rho_threshold": 1.5, "vtrace_clip_pg_rho_threshold": 0.75},
        {"vtrace_clip_rho_threshold": 0.5},
        {"gae_lambda": 0.0},
        {"gae_lambda": 1.0, "gamma": 1.0},
        {"gamma": 0.0},
        {"normalize_advantage": True},
        {"entropy_coef": 0.0},
        {"policy_loss_coef": 0.25, "value_loss_coef": 2.0},
        {"loss_reduction": "sum"},
        {"loss_reduction": "sum", "max_grad_norm": 0.0, "optimizer": RMSPROP_TF},
        {"loss_reduction": "sum", "max_grad_norm": 40.0, "normalize_advantage": True},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 0.0078125},
        {"optimizer": RMSPROP_TF},
        {"optimizer": {"_target_": "torch.optim.RMSprop", "alpha": 0.5, "eps": 0.0078125}},
        {"optimizer": {"_target_": "torch.optim.SGD"}, "loss_reduction": "sum"},
    ],
    ids=str,
)
def test_every_setting_counts(settings):
    """Each threshold, coefficient, bound and optimizer has the effect of its definition."""
    model, rollout, action_space = make_problem("gaussian")
    compare((model, with_ignored(rollout), action_space), make_config(**settings))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("support", [None, [-3, 3]])
@pytest.mark.parametrize("transform", [None, TRANSFORM])
def test_transformed_and_categorical_critics(transform, support, reduction):
    """Values are decoded before V-trace, targets are encoded before the loss."""
    problem = make_problem(value_transform=transform, value_support=support)
    critic = Critic(0.01 if transform else None, tuple(support) if support else None)
    compare(problem, make_config(loss_reduction=reduction), critic)


def test_own_networks_get_the_same_update():
    """A network of a user has the gradients of its own forward pass, summed up as well."""
    problem = make_problem(policy={"_target_": "update_problems.OwnNet"})
    compare(problem, make_config(loss_reduction="sum"))


def test_illegal_actions_have_no_part_in_ratios():
    """With masks, log-probabilities and entropies are those of the legal actions."""
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
    rollout = with_others(rollout, log_probs_of(model, rollout))
    compare((model, rollout, spaces.Discrete(3)), make_config())


# -- memory --------------------------------------------------------------------------------------


def memory_problem(name, cell, ignoring):
    """A policy with a memory; what the actor remembered after the first row is garbage."""
    model = make_model(*EVERY[name], memory=MemoryConfig(cell=cell, size=5))
    rollout = make_rollout(*EVERY[name])
    states = 0.7 * normal(T + 1, B, model.state_size)
    rollout = replace(rollout, hidden_states=states, log_probs=normal(T, B) - 1.5)
    return model, with_ignored(rollout) if ignoring else rollout, EVERY[name][1]


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("ignoring", [False, True])
@pytest.mark.parametrize(("name", "cell"), [("discrete", "lstm"), ("dict_obs", "gru")])
def test_the_memory_is_that_of_the_learner(name, cell, ignoring, length):
    """Values, ratios and gradients: its networks are unrolled from the first row on."""
    config = make_config(sequence_length=length, vtrace_clip_pg_rho_threshold=None)
    compare(memory_problem(name, cell, ignoring), config)


def test_what_the_actor_remembered_first_counts():
    """The first row is no beginning: another memory there gives another update."""
    moved = []
    for scale in (1.0, -1.0):
        model, rollout, _ = memory_problem("discrete", "lstm", ignoring=False)
        states = rollout.hidden_states.clone()
        states[0] *= scale
        ImpalaLearner(model, make_config()).update(
            replace(rollout, hidden_states=states), Progress()
        )
        moved.append(snapshot(model))
    assert any(not torch.equal(moved[0][name], moved[1][name]) for name in moved[0])


# -- normalised observations ---------------------------------------------------------------------


def replayed(rollout, count=1):
    """The rollout whose last environments were learned from before; their weights are oldest."""
    seq_nos = torch.tensor([7] * (B - count) + [0] * count)
    flags = torch.arange(B) >= B - count
    return replace(rollout, weights_seq_no=seq_nos, replayed=flags)


@pytest.mark.parametrize("memory", [None, MemoryConfig(cell="gru", size=5)])
@pytest.mark.parametrize("variant", ["plain", "ignored", "replayed"])
def test_statistics_of_observations(variant, memory):
    """The update uses those from before; afterwards each new transition has entered them once."""
    running = ObservationNormalizationConfig(mode="running", clip=1.5)
    model = make_model(*PROBLEMS["discrete"], normalization=running, memory=memory)
    seen = 2.0 + 3.0 * normal(11, 4, seed=3)
    model.normalizer.update(seen)
    rollout = make_rollout(*PROBLEMS["discrete"])
    rollout = replace(rollout, log_probs=normal(T, B) - 1.0)
    if memory is not None:
        rollout = replace(rollout, hidden_states=normal(T + 1, B, model.state_size))
    if variant == "ignored":
        rollout = with_ignored(rollout)
    elif variant == "replayed":
        rollout = replayed(rollout)
    compare((model, rollout, spaces.Discrete(3)), make_config(), updates=1)
    new = rollout.obs[:-1, : 2 if variant == "replayed" else B].reshape(-1, 4)
    if variant == "ignored":
        new = new[rollout.valid.flatten()]
    known = np.concatenate([seen.numpy(), new.numpy()])
    assert float(model.normalizer.count) == len(known)
    np.testing.assert_allclose(model.normalizer.mean.numpy(), known.mean(0), rtol=1e-12)
    np.testing.assert_allclose(model.normalizer.var.numpy(), known.var(0), rtol=1e-12)


# -- equal policies ------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["discrete", "gaussian", "dict_obs_tuple_action"])
def test_with_equal_policies_it_is_a2c(name, normalize):
    """One update of IMPALA is one of A2C with `gae_lambda=1`, to 12 digits."""
    model, rollout, _ = make_problem(name)
    other, before = copy.deepcopy(model), snapshot(model)
    settings = {**SETTINGS, "gae_lambda": 1.0, "lr": 0.0078125, "entropy_coef": 0.03125}
    settings |= {"normalize_advantage": normalize, "optimizer": {"_target_": "torch.optim.Adam"}}
    on_policy = replace(rollout, log_probs=log_probs_of(model, rollout))
    row = ImpalaLearner(model, ImpalaAlgorithmConfig(**settings)).update(on_policy, Progress())
    A2CLearner(other, A2CAlgorithmConfig(**settings)).update(rollout, Progress())
    assert row.reduce()["train/rho_mean"] == pytest.approx(1.0, rel=1e-6)
    theirs = dict(other.named_parameters())
    for name, param in model.named_parameters():
        assert not torch.equal(param, before[name])
        torch.testing.assert_close(param, theirs[name], rtol=1e-12, atol=1e-13)


# -- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ignoring", [False, True])
@pytest.mark.parametrize("threshold", [1.0, 1.75, None])
def test_statistics_of_importance_weights(threshold, ignoring):
    """Mean of the ratios, and the share above the bound, of transitions alone."""
    model, rollout, action_space = make_problem()
    rollout = with_ignored(rollout) if ignoring else rollout
    config = make_config(vtrace_clip_rho_threshold=threshold)
    row, ratios = compare((model, rollout, action_space), config)
    found = np.array(list(ratios.values()))
    assert row["train/rho_mean"] == pytest.approx(found.mean(), rel=1e-5)
    if threshold is None:
        assert "train/rho_clip_fraction" not in row
    else:
        assert row["train/rho_clip_fraction"] == pytest.approx((found > threshold).mean(), rel=1e-6)


@pytest.mark.parametrize("log_ratio", [100.0, 1000.0])
def test_huge_importance_weights(log_ratio):
    """What the mean is of is bounded, so that it is a number."""
    model, rollout, _ = make_problem()
    rollout = replace(rollout, log_probs=log_probs_of(model, rollout) - log_ratio)
    row = ImpalaLearner(model, make_config()).update(rollout, Progress()).reduce()
    assert row["train/rho_mean"] == pytest.approx(math.exp(40.0), rel=1e-5)
    assert row["train/rho_clip_fraction"] == 1.0


def test_policy_lag():
    """Updates between the weights that acted and those that learn, of new rollouts alone."""
    model, rollout, _ = make_problem()
    learner = ImpalaLearner(model, make_config())
    assert "train/policy_lag_mean" not in learner.update(rollout, Progress()).reduce()
    for _ in range(9):
        learner.update(rollout, Progress())
    row = learner.update(replace(rollout, weights_seq_no=torch.tensor([9, 4, 8])), Progress())
    assert row.reduce()["train/policy_lag_mean"] == pytest.approx((1 + 6 + 2) / 3)
    assert row.reduce()["train/policy_lag_max"] == 6
    row = learner.update(replayed(rollout, count=2), Progress()).reduce()
    assert (row["train/policy_lag_mean"], row["train/policy_lag_max"]) == (4, 4)


def test_kept_rollouts_are_learned_from_like_new_ones():
    """A batch with kept rollouts changes the weights as a batch of new ones does."""
    model, rollout, _ = make_problem()
    other = copy.deepcopy(model)
    ImpalaLearner(model, make_config()).update(rollout, Progress())
    one, two = select_envs(rollout, slice(0, 1)), select_envs(rollout, slice(1, B))
    flags = torch.ones(B - 1, dtype=torch.bool)
    mixed = join_rollouts([one, replace(two, replayed=flags)])
    ImpalaLearner(other, make_config()).update(mixed, Progress())
    assert_same_weights(model, other)


# -- what can not be learned from ----------------------------------------------------------------


def test_a_rollout_without_log_probabilities_is_refused():
    """The text says what they are and how to get them."""
    model, rollout, _ = make_problem()
    with pytest.raises(ShapeError, match=r"no log_probs.*records_log_probs=True"):
        ImpalaLearner(model, make_config()).update(replace(rollout, log_probs=None), Progress())


@pytest.mark.parametrize("normalised", [False, True])
def test_a_rollout_without_transitions(normalised):
    """Nothing is learned from it, nothing enters a statistic, and nothing fails."""
    mode = "running" if normalised else "none"
    settings = {"normalization": ObservationNormalizationConfig(mode=mode)}
    model, rollout, _ = make_problem(**settings)
    before = copy.deepcopy(model.state_dict())
    nothing = replace(rollout, valid=torch.zeros_like(rollout.terminated))
    learner = ImpalaLearner(model, make_config())
    row = learner.update(nothing, Progress()).reduce()
    assert learner._outputs == {}
    assert all(np.isfinite(value) for value in row.values())
    assert "train/rho_mean" not in row
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", ["a2c", "impala"])
def test_gradients_that_are_not_finite(kind):
    """Their steps are left out and counted; a hundred updates in a row without one are an error."""
    model, rollout, _ = make_problem()
    bad = replace(rollout, rewards=torch.full_like(rollout.rewards, math.nan))
    learners = {
        "a2c": (A2CLearner, A2CAlgorithmConfig),
        "impala": (ImpalaLearner, ImpalaAlgorithmConfig),
    }
    make_learner, make_settings = learners[kind]
    advice = "on_non_finite=skip leaves such steps out"
    with pytest.raises(TrainingError, match=advice):
        make_learner(model, make_settings(**SETTINGS)).update(bad, Progress())
    learner = make_learner(model, make_settings(**SETTINGS, on_non_finite="skip"))
    for _ in range(2):
        before = snapshot(model)
        for _ in range(99):
            row = learner.update(bad, Progress()).reduce()
            assert (row["train/skipped_steps"], row["train/gradient_steps"]) == (1, 0)
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name])
        assert learner.update(rollout, Progress()).reduce()["train/gradient_steps"] == 1
        assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    for _ in range(99):
        learner.update(bad, Progress())
    with pytest.raises(TrainingError, match="no other gradient in 100 updates") as caught:
        learner.update(bad, Progress())
    assert "skip" not in str(caught.value)
