"""Batched copies of a policy equal the policy with the same weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from cases import everyday, sweep
from family_cases import CASES as FAMILIES
from family_cases import build as build_family
from gymnasium import spaces
from own_networks import own

from maze_train.core.types import tree_leaves, tree_map
from maze_train.nets.acting import Actor
from maze_train.nets.config import (
    ACTIVATIONS,
    ModelConfig,
    ObservationNormalizationConfig,
    RecurrentConfig,
)
from maze_train.nets.normalization import find_normalizer
from maze_train.nets.policy_model import build_policy
from maze_train.nets.population import (
    ROW_BLOCK,
    BatchedPopulation,
    RowPopulation,
    build_population,
    row_blocks,
)
from maze_train.spaces.agents import AgentSpaces
from maze_train.spaces.describe import flat_space
from maze_train.spaces.tensors import sampled_for
from maze_train.training.multi_agent_models import build_joint_model

COUNTS = (1, 3, 32, 33, 64)
STEPS = 3
"""Number of consecutive observations of a copy."""

BOX = spaces.Box(-np.inf, np.inf, (5,), np.float32)
TURN = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (12, 12, 1), np.uint8)
NESTED = {
    "robot": spaces.Tuple((BOX, spaces.Discrete(3, start=1))),
    "grid": spaces.Box(0, 200, (2, 3), np.uint8),
    "bits": spaces.MultiBinary((2, 2)),
    "cards": spaces.MultiDiscrete([[2, 3], [4, 1]]),
}
MASKED = spaces.Dict({"seen": BOX, "action_mask": spaces.MultiBinary(4)})
SEVERAL = AgentSpaces(
    {"a": MASKED, "b": BOX, "c": MASKED},
    {"a": spaces.Discrete(4), "b": TURN, "c": spaces.Discrete(4)},
)
OBSERVATIONS = {
    "box": BOX,
    "wide": spaces.Box(-np.inf, np.inf, (129,), np.float32),
    "one number": spaces.Box(-1.0, 1.0, (), np.float64),
    "one entry": spaces.Box(-1.0, 1.0, (1,), np.float32),
    "bytes": spaces.Box(0, 200, (7,), np.uint8),
    "bits": spaces.MultiBinary((2, 2)),
    "discrete": spaces.Discrete(6, start=-2),
    "multi discrete": spaces.MultiDiscrete([[2, 3], [4, 1]]),
    "dict": spaces.Dict(NESTED),
    "masked": spaces.Dict({**NESTED, "action_mask": spaces.MultiBinary(4)}),
    "image": IMAGE,
    "dict with image": spaces.Dict({"screen": IMAGE, "speed": BOX}),
    "agents": SEVERAL.observation_space,
}
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "box": TURN,
    "dict": spaces.Dict({"turn": TURN, "keys": spaces.MultiDiscrete([2, 4])}),
}
RUNNING = ObservationNormalizationConfig(mode="running")


BATCHED = {
    **{
        f"box {name}": ({"activation": name, "hidden_sizes": [7, 33]}, "box")
        for name in ACTIVATIONS
    },
    "very wide": ({"hidden_sizes": [257]}, "box"),
    **{f"{name}": ({"hidden_sizes": [30]}, name) for name in OBSERVATIONS if "image" not in name},
    "no hidden layer": ({"hidden_sizes": []}, "box"),
    "no hidden layer, one entry": ({"hidden_sizes": []}, "one entry"),
    "defaults": ({}, "box"),
    "PyTorch's weights": ({"orthogonal_init": False}, "box"),
    "normalised": ({"hidden_sizes": [7, 33], "normalization": RUNNING}, "box"),
    "normalised dict": ({"hidden_sizes": [30], "normalization": RUNNING}, "dict"),
    "trunk": ({"hidden_sizes": [30, 7], "shared_trunk": True}, "masked"),
    "normalised trunk": ({"shared_trunk": True, "normalization": RUNNING}, "box"),
    "flat image": ({"image_encoder": "flat", "hidden_sizes": [5]}, "image"),
}
ROWWISE = {
    "image": ({"hidden_sizes": [30]}, "image"),
    "impala": ({"image_encoder": "impala", "hidden_sizes": [7]}, "image"),
    "dict with image": ({"hidden_sizes": [7], "branch_size": 5}, "dict with image"),
    "own": ({"policy": own("OddNet")}, "box"),
    "own, normalised": ({"policy": own("OddNet"), "normalization": RUNNING}, "box"),
    "own trunk": ({"trunk": own("OwnNet"), "shared_trunk": True}, "box"),
    "own, wide": ({"trunk": own("OwnNet"), "shared_trunk": True, "hidden_sizes": [30]}, "wide"),
    "rule": ({"wrapper": "Rule"}, "box"),
    "normalised rule": ({"wrapper": "Rule", "normalization": RUNNING}, "box"),
    **{
        f"{cell} of {size}": (
            {"hidden_sizes": [30], "rnn": RecurrentConfig(cell=cell, size=size)},
            "box",
        )
        for cell, size in (("lstm", 33), ("lstm", 129), ("gru", 1), ("gru", 33))
    },
    "two layers": ({"rnn": RecurrentConfig(cell="gru", size=33, layers=2)}, "masked"),
    "memory of images": ({"rnn": RecurrentConfig(size=7), "hidden_sizes": [7]}, "image"),
    "normalised memory": ({"rnn": RecurrentConfig(size=7), "normalization": RUNNING}, "dict"),
    "remembering rule": ({"rnn": RecurrentConfig(size=7), "wrapper": "Remembers"}, "box"),
    "agents that remember": ({"rnn": RecurrentConfig(size=7)}, "agents"),
}
CASES = {**BATCHED, **ROWWISE}
OFTEN = [*CASES][::6]
every_case = pytest.mark.parametrize("case", everyday(len(OFTEN), dict.fromkeys([*OFTEN, *CASES])))


def model_of(case, action="discrete", *, has_statistics=True):
    """Return the policy of a case, with statistics if it normalizes, and its flat space."""
    config, obs = CASES[case]
    config = dict(config)
    wrapper = config.pop("wrapper", None)
    space = OBSERVATIONS[obs]
    if obs == "agents":
        model = build_joint_model(build_policy, ModelConfig(**config), SEVERAL, {}, 3)
        return model, flat_space(space)
    model = build_policy(
        ModelConfig(**config),
        space,
        ACTIONS[action],
        3,
        policy_wrapper=None if wrapper is None else own(wrapper),
    )
    normalizer = find_normalizer(model)
    if normalizer is not None and has_statistics:
        # Statistics far from 0 and 1.
        normalizer.update(tree_map(lambda x: 3 * x + 1, sampled_for(flat_space(space), 50)))
    return model, flat_space(space)


def observations(space, n, seed=0):
    """Return n different flat observations; masks have at least one legal action."""
    if isinstance(space, spaces.Dict):
        return {key: observations(leaf, n, seed + i) for i, (key, leaf) in enumerate(space.items())}
    rng = np.random.default_rng(seed)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return torch.from_numpy(rng.standard_normal((n, *space.shape)).astype(np.float32))
    space.seed(seed)
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(n)]))
    if isinstance(space, spaces.MultiBinary):
        obs[:, ..., 0] = 1
    return obs


def trained(module):
    """Return the parameters that are perturbed."""
    return [p for p in module.parameters() if p.requires_grad]


def weights_near(model, n, seed=0):
    """Return random weights `[n, dim]` near those of the model."""
    parts = [p.detach().reshape(-1) for p in trained(model)]
    theta = torch.cat([torch.zeros(0), *parts]).numpy()
    rng = np.random.default_rng(seed)
    return theta + 0.3 * rng.standard_normal((n, theta.size)).astype(np.float32)


def plain_params(model, weights, obs):
    """Return the step-by-step outputs of the model with the given weights."""
    own = copy.deepcopy(model)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), trained(own))
    actor, results = Actor(own, 1), []
    with torch.no_grad():
        for t in range(STEPS):
            params = actor.act(tree_map(lambda x, t=t: x[t : t + 1], obs), None, True).params
            results.append(params[0].clone())
    return torch.stack(results)


class Copies:
    """Weights and observations of copies by number."""

    def __init__(self, model, space, n=6):
        self.model = model
        self.weights = weights_near(model, n)
        self.obs = [observations(space, STEPS, 100 * i) for i in range(n)]

    def play(self, population, numbers):
        """Return the parameters `[STEPS, param_size]` of each row, which plays the given number."""
        for row, number in enumerate(numbers):
            population.weights_of(row)[:] = self.weights[number]
            population.forget(row)
        steps = [self.step(population, dict(enumerate(numbers)), t) for t in range(STEPS)]
        return torch.stack(steps, 1)

    def check(self, found):
        """Assert that the parameters match the model within float32."""
        for params, weights, obs in zip(found, self.weights, self.obs, strict=False):
            expected = plain_params(self.model, weights, obs)
            assert params.dtype == torch.float32
            scale = float(expected[expected > -1e30].abs().max())
            torch.testing.assert_close(params, expected, rtol=2e-6, atol=2e-6 * scale)

    def step(self, population, numbers, t):
        """Return the parameters of the rows for observation t of their numbers."""
        others = (next(iter(numbers.values())) + 1) % len(self.obs)
        played = [numbers.get(row, others) for row in range(population.rows)]
        leaves = [tree_map(lambda x: x[t], self.obs[number]) for number in played]
        if isinstance(leaves[0], dict):
            obs = {key: torch.stack([row[key] for row in leaves]) for key in leaves[0]}
        else:
            obs = torch.stack(leaves)
        with torch.no_grad():
            params = population.act([*numbers], obs, None, True).params
        assert len(params) == row_blocks(len(numbers))
        return params[: len(numbers)].clone()


@every_case
@sweep("action", ["box", "dict"])
def test_population_row_equals_policy_with_its_weights(case, action):
    """Each row matches the policy with its weights, and the policy is not modified."""
    model, space = model_of(case, "discrete" if CASES[case][1] == "masked" else action)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    copies = Copies(model, space)
    population = build_population(model, 6)
    assert type(population) is (BatchedPopulation if case in BATCHED else RowPopulation)
    found = copies.play(population, range(6))
    copies.check(found)
    assert len({found[row].numpy().tobytes() for row in range(6)}) == 6
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


@every_case
def test_population_rows_are_independent(case):
    """Results are bit-for-bit identical in any row, for any other rows and any population size."""
    model, space = model_of(case)
    copies = Copies(model, space)
    rng = np.random.default_rng(0)
    known = {}
    largest = build_population(model, 64)
    for count in (3, 32, 33) if "image" in CASES[case][1] else COUNTS:
        numbers = rng.integers(0, 6, count)
        # Populations of other sizes have another memory layout.
        others = [build_population(model, count)] if case in BATCHED or count in (3, 33) else []
        for population in (largest, *others):
            for number, params in zip(numbers, copies.play(population, numbers), strict=True):
                assert torch.equal(known.setdefault(number, params), params), (count, number)
    assert len(known) == 6


# -- rows that pause -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 32])
@pytest.mark.parametrize("case", ["box tanh", "own", "gru of 33", "two layers", "remembering rule"])
def test_paused_rows_keep_weights_and_hidden_state(case, n):
    """Copies keep weights and hidden state while other rows are computed."""
    model, space = model_of(case)
    copies = Copies(model, space, n + 2)
    expected = copies.play(build_population(model, n), range(n))
    population = build_population(model, n)
    copies.play(population, [n, n + 1] * (n // 2))
    for row in range(n):
        population.weights_of(row)[:] = copies.weights[row]
        population.forget(row)
    steps = dict.fromkeys(range(n), 0)
    for playing in ({1, 3}, {2}, {2, 3}, {0}, {0, 1}, {0, 1, 2, 3}):
        rows = [row for row in range(n) if row % 4 in playing]
        (t,) = {steps[row] for row in rows}
        assert torch.equal(copies.step(population, {k: k for k in rows}, t), expected[rows, t])
        steps |= dict.fromkeys(rows, t + 1)
        for row in range(n):
            np.testing.assert_array_equal(population.weights_of(row), copies.weights[row])


@pytest.mark.parametrize("n", [31, 32, 33, 64])
@pytest.mark.parametrize("case", ["box tanh", "dict"])
def test_population_rows_are_unaffected_by_ended_rows(case, n):
    """The remaining rows are unaffected when rows end in any order and begin again."""
    model, space = model_of(case)
    copies = Copies(model, space, n)
    expected = copies.play(build_population(model, n), range(n))
    population = build_population(model, n)
    for row in range(n):
        population.weights_of(row)[:] = copies.weights[row]
    rng = np.random.default_rng(n)
    orders = [np.arange(n), np.arange(n)[::-1], rng.permutation(n)]
    for ending in orders:
        for count in (n, n - 1, n - 9, n // 2, 3, 1):
            rows = sorted(ending[n - count :].tolist())
            found = copies.step(population, {row: row for row in rows}, 1)
            assert torch.equal(found, expected[rows, 1]), count


@pytest.mark.parametrize(
    "case", ["lstm of 33", "gru of 1", "remembering rule", "normalised memory"]
)
def test_hidden_states_of_population_rows_are_separate(case):
    """Hidden states of copies are separate, and zero initially and after `forget`."""
    model, space = model_of(case)
    copies = Copies(model, space)
    population = build_population(model, 3)
    expected = copies.play(population, [0, 1, 2])
    every = {row: row for row in range(3)}
    assert not torch.equal(expected[:, 0], copies.step(population, every, 0))
    for row in range(3):
        population.forget(row)
    first = [copies.step(population, every, t) for t in range(2)]
    assert torch.equal(torch.stack(first, 1), expected[:, :2])
    population.forget(1)
    third = copies.step(population, every, 2)
    assert torch.equal(third[[0, 2]], expected[[0, 2], 2])
    assert not torch.equal(third[1], expected[1, 2])
    population.forget(1)
    assert torch.equal(copies.step(population, {0: 0, 1: 1}, 0)[1], expected[1, 0])


# -- what is perturbed ---------------------------------------------------------------------------


@sweep("case", CASES)
def test_population_weights_follow_the_parameter_order(case):
    """Weights are the trainable parameters, each flattened once, in order."""
    model, _ = model_of(case, "discrete")
    population = build_population(model, 3)
    expected = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert population.dim == expected
    rows = 3 if isinstance(population, RowPopulation) else ROW_BLOCK
    assert population.weights_of(2).shape == (expected,)
    assert population.rows == rows
    if isinstance(population, RowPopulation):
        for row in range(3):
            population.weights_of(row)[:] = 1_000 * row + np.arange(expected, dtype=np.float32)
        for row, own in enumerate(population._copies):
            flat = torch.cat([p.detach().reshape(-1) for p in trained(own)])
            np.testing.assert_array_equal(flat, population.weights_of(row))


@pytest.mark.parametrize("case", ["box tanh", "trunk", "dict", "own", "gru of 33", "rule"])
@sweep("frozen", ["first", "last", "every second"])
def test_population_excludes_frozen_parameters(case, frozen):
    """Frozen parameters are excluded and follow the model."""
    model, space = model_of(case, "discrete" if case == "trunk" else "box")
    params = trained(model)
    chosen = {"first": params[:1], "last": params[-1:], "every second": params[::2]}[frozen]
    for p in chosen:
        p.requires_grad_(False)
    copies = Copies(model, space)
    population = build_population(model, 6)
    assert population.dim == sum(p.numel() for p in params) - sum(p.numel() for p in chosen)
    for change in (0.0, 0.5):
        with torch.no_grad():
            for p in chosen:
                p.add_(change)
        copies.check(copies.play(population, range(6)))


def test_non_finite_weights_affect_their_row_only():
    """Non-finite weights give NaN for their copy without a warning and do not affect others."""
    model, space = model_of("box tanh")
    copies = Copies(model, space)
    expected = copies.play(build_population(model, 2), [0, 1])
    copies.weights[1] = np.inf
    found = copies.play(build_population(model, 2), [0, 1])
    assert torch.equal(found[0], expected[0])
    assert found[1].isnan().any()


@pytest.mark.parametrize("case", [case for case in CASES if "normalised" in case])
@pytest.mark.parametrize("has_statistics", [False, True])
def test_population_uses_statistics_of_the_model(case, has_statistics):
    """Copies use the model's statistics, including later updates and loaded states."""
    model, space = model_of(case, has_statistics=has_statistics)
    copies = Copies(model, space)
    population = build_population(model, 2)
    before = copies.play(population, [0, 1])
    state = model.state_dict()
    saved = {key: value.clone() for key, value in state.items()}
    normalizer = find_normalizer(model)
    assert normalizer is not None
    normalizer.update(tree_map(lambda x: 10 * x - 5, observations(space, 20)))
    after = copies.play(population, [0, 1])
    assert not torch.equal(before, after)
    copies.check(after)
    model.load_state_dict(saved)
    assert torch.equal(copies.play(population, [0, 1]), before)


@pytest.mark.parametrize("case", ["own", "rule"])
def test_population_buffers_follow_the_model(case):
    """Buffers are not perturbed and follow the model."""
    model, space = model_of(case)
    copies = Copies(model, space)
    population = build_population(model, 6)
    before = copies.play(population, range(6))
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    for key, value in model.named_buffers():
        if value.is_floating_point():
            saved[key] = value + 0.7
    model.load_state_dict(saved)
    after = copies.play(population, range(6))
    assert not torch.equal(before, after)
    copies.check(after)
    for key, value in model.named_buffers():
        assert torch.equal(value, saved[key])


# -- which is which ------------------------------------------------------------------------------


def test_custom_networks_are_computed_row_by_row():
    """Subclasses of template networks are computed row by row."""
    model, _ = model_of("box tanh")
    assert type(build_population(model, 1)) is BatchedPopulation
    for module in (model, model.policy, model.policy.net, model.policy.net.layers):
        kind = type(module)
        module.__class__ = type("Own", (kind,), {})
        assert type(build_population(model, 1)) is RowPopulation
        module.__class__ = kind
    assert type(build_population(model, 1)) is BatchedPopulation


# -- actions of rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILIES)
@sweep("scale", [0.3, 3.0])
def test_population_actions_are_independent_of_other_rows(case, scale):
    """Modes and samples are bit-for-bit identical in any row of complete blocks."""
    family, _ = build_family(case)
    generator = torch.Generator().manual_seed(0)
    params = scale * torch.randn(9, family.param_size, generator=generator)
    noise = family.draw_noise((9,), generator)
    known = {}
    for rows in (32, 64, 96, 160):
        numbers = torch.randint(0, 9, (rows,), generator=generator)
        own = params[numbers]
        for kind, actions in (
            ("mode", family.mode(own)),
            ("sample", family.sample(own, noise[numbers])),
        ):
            leaves = [*tree_leaves(actions), *tree_leaves(family.to_env(actions))]
            for row, number in enumerate(numbers.tolist()):
                found = [leaf[row].numpy().tobytes() for leaf in leaves]
                assert known.setdefault((kind, number), found) == found, (kind, row)
    assert len(known) == 18
