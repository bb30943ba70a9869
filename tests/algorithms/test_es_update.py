"""Updates of evolution strategies match loops over members and entries in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from reference_es import SlowES
from torch import nn

from maze_train.algorithms.es.config import ESAlgorithmConfig
from maze_train.algorithms.es.learner import ESLearner, EvaluatedPopulation
from maze_train.algorithms.es.population import ESRolloutResult, SharedNoiseTable
from maze_train.collect.play import ObservationMoments, PlayedEpisode
from maze_train.core.errors import TrainingError
from maze_train.core.step_end import TERMINATED
from maze_train.functional.moments import batch_moments
from maze_train.learner.config import Progress
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig
from maze_train.nets.policy_model import build_policy

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ARM = spaces.Box(-1.0, 1.0, (2,), np.float32)
PAIRS = 4


class ExactNoise(SharedNoiseTable):
    """Noise table that returns float64."""

    def get(self, index, dim):
        return torch.from_numpy(self.array[index : index + dim].astype(np.float64))


class Directions(torch.optim.Optimizer):
    """Optimizer that moves each tensor by `lr` against its normalized gradient."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad / torch.linalg.vector_norm(param.grad)


class NetWithBuffers(nn.Module):
    """User-defined network with batch norm and a frozen layer."""

    def __init__(self, observation_space, output_size):
        super().__init__()
        self.first = nn.Linear(observation_space.shape[0], 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, output_size)
        self.first.requires_grad_(False)
        self.norm.running_mean.fill_(0.25)

    def forward(self, obs):
        return self.last(torch.tanh(self.norm(self.first(obs))))


@pytest.fixture
def table():
    """Yield a small noise table."""
    table = ExactNoise(3000, seed=4)
    yield table
    table.close()


def make_model(action_space=ARM, **settings):
    """Return a small policy in float64."""
    config = ModelConfig(**{"hidden_sizes": [4, 3], **settings})
    return build_policy(config, BOX, action_space, seed=1).double()


def make_config(**settings):
    """Return settings with a large learning rate and L2 penalty."""
    return ESAlgorithmConfig(**{"lr": 0.05, "l2_penalty": 0.02, **settings})


def trained(model):
    """Return the trainable parameters in order."""
    return [param for param in model.parameters() if param.requires_grad]


def theta_of(model):
    """Return the entries of the trainable parameters as one list."""
    return [x for param in trained(model) for x in param.detach().flatten().tolist()]


def member(number, fitness, moments=None):
    """Return the episode of a member; only its fitness affects an update."""
    return PlayedEpisode(
        number=number,
        seed=0,
        episode_return=-100.0,
        length=7 * number + 1,
        success=math.nan,
        end=TERMINATED,
        fitness=fitness,
        moments=moments,
    )


def population(table, returns, indices, moments=None):
    """Return pairs with the given returns and noise indices."""
    observed = iter(moments or [None] * 2 * len(returns))
    pairs = [
        ESRolloutResult(
            3 * k + 1,  # some pairs were lost
            index,
            (member(6 * k + 2, plus, next(observed)), member(6 * k + 3, minus, next(observed))),
        )
        for k, ((plus, minus), index) in enumerate(zip(returns, indices, strict=True))
    ]
    return EvaluatedPopulation(pairs, table)


def draw_returns(rng, kind="ties"):
    """Return random returns of pairs, with or without ties."""
    if kind == "ties":
        return rng.integers(0, 4, (PAIRS, 2)).astype(float).tolist()
    return (50.0 * rng.standard_normal((PAIRS, 2)) - 300.0).tolist()


def assert_equals_reference(table, model, config, optimizer):
    """Assert that parameters and metrics match the reference after each of five updates."""
    rng = np.random.default_rng(11)
    others = {k: v.clone() for k, v in model.state_dict().items()}
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    size = sum(param.numel() for param in trained(model))
    learner, slow = ESLearner(model, config), SlowES(trained(model), config, optimizer)
    for i in range(5):
        returns = draw_returns(rng, "ties" if i % 2 == 0 else "distinct")
        indices = rng.integers(0, table.count - size, PAIRS).tolist()
        noise = [table.array[j : j + size].tolist() for j in indices]
        statistics = learner.update(population(table, returns, indices), Progress())
        expected = slow.update(returns, noise, config.lr)
        assert theta_of(model) == pytest.approx(slow.theta, rel=1e-10, abs=1e-11)
        assert statistics.reduce() == pytest.approx(expected, rel=1e-9)
    for name, value in model.state_dict().items():
        assert torch.equal(value, others[name]) == (name not in names), name
    assert learner.weights_seq_no == 5


# -- steps ---------------------------------------------------------------------------------------

SGD: dict[str, Any] = {"_target_": "torch.optim.SGD"}
OPTIMIZERS = {
    "Adam": ({"_target_": "torch.optim.Adam"}, partial(torch.optim.Adam, eps=1e-5)),
    "SGD": ({**SGD, "momentum": 0.5}, partial(torch.optim.SGD, momentum=0.5)),
    "not entry by entry": ({"_target_": "test_es_update.Directions"}, Directions),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_es_update_matches_the_reference(table, name):
    """Parameters and metrics match the paper after each of five updates, with any optimizer."""
    node, slow = OPTIMIZERS[name]
    assert_equals_reference(table, make_model(), make_config(optimizer=node), slow)


@pytest.mark.parametrize(
    "settings",
    [
        {"fitness_shaping": "normalized"},
        {"fitness_shaping": "raw", "lr": 1e-3},
        {"l2_penalty": 0.0},
        {"l2_penalty": 3.0},
        {"noise_stddev": 5.0},  # does not affect the step
        {"max_grad_norm": 1e6},
        {"max_grad_norm": 0.01},
        {"max_grad_norm": 0.01, "fitness_shaping": "raw", "l2_penalty": 0.0},
    ],
    ids=str,
)
def test_es_settings_match_the_reference(table, settings):
    """Each setting matches the reference; `max_grad_norm` bounds gradient plus L2 penalty."""
    config = make_config(optimizer=SGD, **settings)
    assert_equals_reference(table, make_model(), config, torch.optim.SGD)


@pytest.mark.parametrize("name", ["Adam", "not entry by entry"])
def test_es_does_not_change_untrained_parameters(table, name):
    """Frozen layers, an unused std and buffers get no noise and no updates."""
    model = make_model(policy={"_target_": "test_es_update.NetWithBuffers"})
    model.policy.free_params.requires_grad_(False)
    node, slow = OPTIMIZERS[name]
    assert len(trained(model)) == 4 < len(list(model.parameters()))
    assert_equals_reference(table, model, make_config(optimizer=node), slow)


def test_es_step_follows_the_better_noise():
    """The step follows the noise of a pair whose θ + σε has the higher return.

    The test uses float32, as training does.
    """
    table, config = SharedNoiseTable(3000, seed=4), make_config(l2_penalty=0.0, optimizer=SGD)
    for (plus, minus), sign in (((2.0, 1.0), 1), ((1.0, 2.0), -1)):
        model = make_model().float()
        before = np.array(theta_of(model))
        ESLearner(model, config).update(population(table, [[plus, minus]], [9]), Progress())
        step = np.array(theta_of(model)) - before
        noise = table.get(9, len(step)).numpy()
        np.testing.assert_allclose(step, sign * 0.05 * 0.5 * noise, rtol=1e-5, atol=1e-6)
    table.close()


def test_policies_learn_from_returns_of_their_agents(table):
    """Each policy learns from the mean return of its agents and its slice of the noise."""
    config, returns = make_config(), {"p": [3.0, 1.0], "q": [1.0, 5.0], "r": [2.0, 2.0]}
    several = population(table, [[0.0, 0.0]], [40])
    for pair in several.pairs:
        for i, one in enumerate(pair.members):
            one.agent_returns.update({agent: own[i] for agent, own in returns.items()})
    alone, models = make_model(), {"x": make_model(), "y": make_model(), "z": make_model()}
    before, size = theta_of(alone), len(theta_of(alone))
    agents = {"x": ["p", "q"], "y": ["q"], "z": ["r"]}
    parts = {
        key: replace(several, agents=agents[key], offset=i * size) for i, key in enumerate(models)
    }
    learner = ESLearner(models, config)
    row = learner.update(parts, Progress()).reduce()
    assert parts["x"].fitness.tolist() == [[2.0, 3.0]]
    for i, fitness in enumerate([[2.0, 3.0], [1.0, 5.0]]):
        alone = make_model()
        expected = ESLearner(alone, config).update(
            population(table, [fitness], [40 + i * size]), Progress()
        )
        key = "xyz"[i]
        assert theta_of(models[key]) == pytest.approx(theta_of(alone), rel=1e-12)
        ratio = expected.reduce()["train/update_ratio"]
        assert row[f"train/{key}/update_ratio"] == pytest.approx(ratio)
    assert theta_of(models["z"]) == before, "its agent got the same from both"


# -- equal returns -------------------------------------------------------------------------------

EQUAL = {"all": [[3.5, 3.5]] * PAIRS, "within pairs": [[1.0, 1.0], [4.0, 4.0], [-2.0, -2.0]]}


@pytest.mark.parametrize("shaping", ["centered_ranks", "normalized", "raw"])
@pytest.mark.parametrize("returns", EQUAL.values(), ids=EQUAL)
def test_equal_returns_change_no_parameter(table, returns, shaping):
    """Equal returns change no parameters, despite weight decay and optimizer moments."""
    indices = list(range(len(returns)))
    for name in ("Adam", "SGD"):
        settings = {"fitness_shaping": shaping, "optimizer": OPTIMIZERS[name][0]}
        model = make_model()
        learner = ESLearner(model, make_config(l2_penalty=0.5, **settings))
        for _ in range(2):
            before = theta_of(model)
            row = learner.update(population(table, returns, indices), Progress()).reduce()
            assert theta_of(model) == before
            assert (row["train/policy_grad_norm"], row["train/update_ratio"]) == (0.0, 0.0)
            assert row["train/gradient_steps"] == 0.0
            learner.update(population(table, [[1.0, 2.0]], [5]), Progress())
            assert theta_of(model) != before


# -- statistics of observations ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["running", "frozen", "in a wrapper"])
def test_observation_statistics_are_updated_after_the_update(table, kind):
    """Each observation is added once, after its update, wherever the normalizer is.

    Updates without moments add nothing, and frozen statistics do not change.
    """
    running = ObservationNormalizationConfig(mode="running")
    policy = make_model(normalization=running)
    known, rng = np.ones((5, 3)).cumsum(0), np.random.default_rng(5)
    policy.normalizer.update(torch.from_numpy(known))
    if kind == "frozen":
        policy.normalizer.freeze()
    model = nn.Sequential(nn.Identity(), policy) if kind == "in a wrapper" else policy
    learner = ESLearner(model, make_config())
    for lengths in ([1, 30, 2, 7], [200, 1, 1, 1], []):
        parts = [100.0 + 5.0 * rng.standard_normal((count, 3)) for count in lengths]
        batches = [batch_moments(torch.from_numpy(part)) for part in parts]
        moments = [
            ObservationMoments(batch.count.numpy(), batch.mean.numpy(), batch.var.numpy())
            for part, batch in zip(parts, batches, strict=True)
        ]
        pairs = population(table, [[1, 2], [3, 4]], [0, 8], moments)
        learner.update(pairs, Progress())
        known = known if kind == "frozen" else np.concatenate([known, *parts])
        assert float(policy.normalizer.count) == len(known)
        np.testing.assert_allclose(policy.normalizer.mean.numpy(), known.mean(0), rtol=1e-10)
        np.testing.assert_allclose(policy.normalizer.var.numpy(), known.var(0), rtol=1e-10)


# -- what is not finite --------------------------------------------------------------------------


def test_non_finite_returns_raise(table):
    """Non-finite returns raise an error, also with `skip`, and parameters do not change."""
    model = make_model()
    before = theta_of(model)
    learner = ESLearner(model, make_config(on_non_finite="skip"))
    with pytest.raises(TrainingError, match="1 of 4 returns are not finite"):
        learner.update(population(table, [[1.0, 2.0], [math.inf, 0.0]], [0, 1]), Progress())
    assert theta_of(model) == before
