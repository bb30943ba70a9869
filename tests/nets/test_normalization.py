"""Observation normalization by running statistics."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.core.errors import ConfigError, TrainingError
from maze_train.nets.config import ObservationNormalizationConfig
from maze_train.nets.normalization import ObservationNormalizer

INF = np.inf
SPACE = spaces.Dict(
    OrderedDict(
        [
            ("robot/pos.x", spaces.Box(-INF, INF, (2, 3))),
            ("image", spaces.Box(0, 255, (20, 20, 3), np.uint8)),
            ("goal", spaces.Discrete(4)),
            ("level", spaces.Box(0, 1000, (), np.int64)),
            ("memory", spaces.Box(0, 255, (4,), np.uint8)),
            ("parts", spaces.MultiDiscrete([2, 3])),
            ("flags", spaces.MultiBinary(2)),
        ]
    )
)
NORMALIZED = ["robot/pos.x", "level", "memory"]
LONE = spaces.Box(-INF, INF, (3,))


def make_normalizer(space=SPACE, **settings):
    """Return a normalizer in evaluation mode."""
    return ObservationNormalizer(space, ObservationNormalizationConfig(**settings)).eval()


def observations(n, seed=0):
    """Return observations of the Dict space above, `[n, 2, ...]`."""
    rng, shape = np.random.default_rng(seed), (n, 2)
    columns = {
        "robot/pos.x": (rng.normal(3, 2, (*shape, 2, 3)) * np.arange(1, 7).reshape(2, 3)),
        "image": rng.integers(0, 256, (*shape, 20, 20, 3)).astype(np.uint8),
        "goal": rng.integers(0, 4, shape),
        "level": rng.integers(0, 1000, shape),
        "memory": rng.integers(0, 256, (*shape, 4)).astype(np.uint8),
        "parts": rng.integers(0, 2, (*shape, 2)),
        "flags": rng.integers(0, 2, (*shape, 2)).astype(np.int8),
    }
    columns["robot/pos.x"] = columns["robot/pos.x"].astype(np.float32)
    return {key: torch.from_numpy(column) for key, column in columns.items()}


def slow_normalized(x, seen, clip):
    """Return observations normalized entry by entry in double precision."""
    seen = seen.astype(np.float64).reshape(-1, *seen.shape[2:])
    result = np.empty(x.shape)
    for index in np.ndindex(x.shape):
        column = seen[(slice(None), *index[2:])]
        value = (float(x[index]) - np.mean(column)) / np.sqrt(np.var(column) + 1e-8)
        result[index] = min(max(value, -clip), clip) if clip else value
    return result


@pytest.mark.parametrize("clip", [0.0, 1.0, 10.0])
def test_normalizer_follows_its_definition(clip):
    """Vectors, scalars and byte vectors are normalized; other leaves are unchanged."""
    normalizer, batches = make_normalizer(clip=clip), [observations(n, n) for n in (5, 1, 8)]
    for batch in batches:
        normalizer.train(batch is batches[0])  # the mode has no effect
        normalizer.update({key: batch[key] for key in NORMALIZED})
    obs = observations(4, seed=20)
    kept = {key: leaf.clone() for key, leaf in obs.items()}
    normalized = normalizer(obs)
    torch.testing.assert_close(normalizer.train()(obs), normalized, rtol=0, atol=0)
    assert list(normalized) == list(obs)
    assert normalizer.keys == NORMALIZED
    for key, leaf in normalized.items():
        assert torch.equal(obs[key], kept[key])
        if key in NORMALIZED:
            seen = torch.cat([batch[key] for batch in batches]).numpy()
            expected = slow_normalized(obs[key].numpy(), seen, clip)
            np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)
            assert leaf.dtype == torch.float32
        else:
            assert leaf is obs[key]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("leading", [(), (7,), (2, 7)])
def test_normalizer_accepts_a_single_observation(leading, dtype):
    """A Box without a key can have any leading dimensions and dtype."""
    normalizer = make_normalizer(LONE)
    seen = torch.tensor([[0.0, 10.0, -4.0], [2.0, 30.0, 4.0]])
    normalizer.update(seen)
    obs = torch.ones(*leading, 3).to(dtype)
    normalized = normalizer(obs)
    expected = torch.tensor([0.0, -1.9, 0.25]).expand(*leading, 3)
    torch.testing.assert_close(normalized, expected)
    assert normalizer.keys == [""]


def test_normalizer_without_statistics_is_the_identity():
    """Values are not even clipped, but they have the same dtype as later."""
    normalizer, obs = make_normalizer(clip=1.0), observations(3)
    for _ in range(2):
        normalized = normalizer(obs)
        for key, leaf in obs.items():
            expected = leaf.float() if key in normalizer.keys else leaf
            assert torch.equal(normalized[key], expected)
            assert normalized[key].dtype is expected.dtype
        normalizer.update({key: leaf[:0] for key, leaf in obs.items()})


@pytest.mark.parametrize("value", [0.0, 0.1, -7.0, 1e6])
def test_normalized_constant_entries_are_zero(value):
    """Constant entries become 0, and tiny differences are not amplified, also without clipping."""
    normalizer = make_normalizer(LONE, clip=0.0)
    seen = torch.randn(50, 3)
    seen[:, 1] = value
    for rows in seen.split(7):
        normalizer.update(rows)
    assert not normalizer(seen)[:, 1].any()
    hair = max(1e-3, abs(value) * 2e-7)
    other = seen + hair
    assert float(normalizer(other)[:, 1].abs().max()) <= 2 * hair
    assert float(normalizer(other)[:, 0].abs().max()) > 0.5


@pytest.mark.parametrize("mean", [1e4, 1e6, -1e6])
def test_small_spread_around_a_large_mean_is_accurate(mean):
    """Float32 values are normalized as in float64, also if float32 would round their mean."""
    normalizer = make_normalizer(LONE)
    seen = mean + 1.5 * torch.randn(4000, 3)
    for rows in seen.split(100):
        normalizer.update(rows)
    normalized = normalizer(seen)
    wide = seen.double()
    expected = ((wide - wide.mean(0)) / wide.std(0, correction=0)).float()
    torch.testing.assert_close(normalized, expected, rtol=1e-5, atol=1e-5)
    assert normalized.mean(0).abs().max() < 2e-3
    torch.testing.assert_close(normalized.std(0), torch.ones(3), rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
@pytest.mark.parametrize("spread", [1, 50])
def test_large_integers_keep_their_differences(dtype, spread):
    """Differences of large integers that float32 cannot represent are preserved."""
    space = spaces.Box(0, 2**31 - 1, (2,), dtype)
    normalizer = make_normalizer(space).half().float()
    seen = 1_700_000_000 + torch.arange(200).remainder(spread + 1)[:, None].expand(200, 2)
    assert normalizer(seen).dtype == torch.float32
    for rows in seen.split(30):
        normalizer.update(rows)
    expected = (seen - seen.double().mean(0)) / seen.double().std(0, correction=0)
    assert normalizer(seen).dtype == torch.float32
    torch.testing.assert_close(normalizer(seen), expected.float(), rtol=1e-5, atol=1e-5)


def test_normalizer_state_round_trips():
    """A loaded state gives the same results in a new or used normalizer.

    The state includes `frozen`, which disables updates.
    """
    first, obs = make_normalizer(), observations(4)
    first.update(observations(6, seed=5))
    assert not first.frozen
    first.freeze()
    file = io.BytesIO()
    torch.save(torch.nn.Sequential(first).state_dict(), file)
    used = make_normalizer()
    used.update(observations(3, seed=6))
    for other in (make_normalizer(), used):
        file.seek(0)
        torch.nn.Sequential(other).load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(other(obs), first(obs), rtol=0, atol=0)
        assert torch.equal(other.var, first.var)
        assert other.var.data_ptr() != first.var.data_ptr()
        other.update(observations(9, seed=3))
        torch.testing.assert_close(other.state_dict(), first.state_dict(), rtol=0, atol=0)
    assert sorted(first.state_dict()) == ["count", "frozen", "mean", "var"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_converted_normalizer_keeps_its_statistics(dtype):
    """A converted module computes in its new dtype from unchanged statistics."""
    normalizer = make_normalizer(LONE)
    normalizer.update(torch.randn(50, 3, dtype=torch.float64) + 1e3)
    mean = normalizer.mean.clone()
    torch.nn.Sequential(normalizer).to(dtype)
    assert torch.equal(normalizer.mean, mean)
    assert normalizer(torch.ones(2, 3)).dtype == dtype
    normalizer.update(torch.randn(50, 3))
    assert normalizer.var.dtype == torch.float64


def test_normalizer_passes_gradients_of_observations():
    """Gradients flow through observations but never through statistics."""
    normalizer = make_normalizer(LONE)
    obs = torch.tensor([[0.0, 5.0, 1e3]], requires_grad=True)
    normalizer.update(torch.tensor([[0.0, 1.0, 2.0], [4.0, 3.0, 2.0]]) + obs * 0)
    normalizer(obs).sum().backward()
    torch.testing.assert_close(obs.grad, torch.tensor([[0.5, 1.0, 0.0]]))
    assert not normalizer.mean.requires_grad


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_non_finite_observations_raise_without_update(value):
    """The error contains key and entry, and no statistics change."""
    normalizer, obs = make_normalizer(), observations(4)
    normalizer.update(obs)
    before = copy.deepcopy(normalizer.state_dict())
    obs["robot/pos.x"][2, 1, 1, 0] = value
    expected = rf"entry \[1, 0\] of the observation 'robot/pos.x' is {value}"
    with pytest.raises(TrainingError, match=expected):
        normalizer.update(obs)
    assert all(torch.equal(x, before[key]) for key, x in normalizer.state_dict().items())
    for space, entry, rows in (
        (LONE, r"\[2\]", [[0.0, 1.0, value]]),
        (spaces.Box(0, 1, ()), r"\[\]", [value]),
    ):
        with pytest.raises(TrainingError, match=rf"entry {entry} of the observation is"):
            make_normalizer(space).update(torch.tensor(rows))


def test_excluded_keys_are_not_normalized():
    """Excluded keys pass unchanged, including keys that are never normalized."""
    normalizer = make_normalizer(exclude=["level", "image"])
    assert normalizer.keys == ["robot/pos.x", "memory"]
    obs = observations(3)
    normalizer.update(obs)
    assert normalizer(obs)["level"] is obs["level"]
    assert normalizer.mean.shape == (10,)


def test_unknown_excluded_keys_raise():
    """The error suggests a similar key."""
    with pytest.raises(ConfigError, match="did you mean 'memory'") as caught:
        make_normalizer(exclude=["memry"])
    assert caught.value.key == "model.normalization.exclude"
    assert caught.value.value == "memry"
    for key in ("x", ""):
        with pytest.raises(ConfigError, match="without keys"):
            make_normalizer(LONE, exclude=[key])


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3), SPACE["image"], spaces.Box(-1, 1, (0,))], ids=str
)
def test_normalizer_passes_other_observations(space):
    """A single observation of another kind passes unchanged."""
    normalizer = make_normalizer(space)
    obs = torch.zeros(5, *space.shape)
    normalizer.update(obs)
    assert normalizer(obs) is obs
    assert normalizer.keys == []
