from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from maze_train.core.errors import ConfigError
from maze_train.functional.value_transforms import ReduceScaleValueTransform
from maze_train.nets.actor_critic import ValueHead
from maze_train.nets.config import ModelConfig

TRANSFORM = ReduceScaleValueTransform(epsilon=1e-2)
RNG = np.random.default_rng(0)
RAW, TARGETS, OLD = (3.0 * RNG.standard_normal(6) for _ in range(3))


def column(values):
    """Return raw outputs [N, 1] of a scalar critic."""
    return torch.from_numpy(np.array(values)).unsqueeze(-1)


def slow_transform(x):
    """Return h(x) as defined in the paper."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-2 * x


def slow_two_hot_loss(logits, targets, low, high):
    """Return the cross-entropy with the two neighbours of each target, sample by sample."""
    total = 0.0
    for row, target in zip(logits, targets, strict=True):
        inside = min(max(float(target), low), high)
        below = min(math.floor(inside), high - 1)
        weights = {below: 1 - (inside - below), below + 1: inside - below}
        normalizer = math.log(sum(math.exp(x) for x in row))
        total -= sum(w * (float(row[k - low]) - normalizer) for k, w in weights.items())
    return total / len(targets)


def test_scalar_value_head_returns_the_output():
    """Without transform and support, the raw output is the value, and targets are returns."""
    head = ValueHead()
    assert head.output_size == 1
    assert head.values(column(RAW)).tolist() == RAW.tolist()
    assert head.targets(torch.from_numpy(TARGETS)).tolist() == TARGETS.tolist()


@pytest.mark.parametrize("transform", [None, TRANSFORM])
@pytest.mark.parametrize("clip_range", [0.0, 0.7])
def test_scalar_value_loss_is_the_mean_squared_error(transform, clip_range):
    """The loss compares raw outputs with transformed returns, clipped around old raw values."""
    head = ValueHead(transform)
    h = slow_transform if transform else float
    expected = 0.0
    for v, target, old in zip(RAW, TARGETS, OLD, strict=True):
        errors = [(v - h(target)) ** 2]
        if clip_range:
            clipped = h(old) + min(max(v - h(old), -clip_range), clip_range)
            errors.append((clipped - h(target)) ** 2)
        expected += max(errors) / len(RAW)
    targets, old = (head.targets(torch.from_numpy(x)) for x in (TARGETS, OLD))
    loss = head.loss(column(RAW), targets, old, clip_range)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_values_are_in_units_of_returns():
    """Exact predictions of transformed targets give exact returns."""
    head = ValueHead(TRANSFORM)
    returns = torch.tensor([-1000.0, -1.0, 0.0, 0.3, 5000.0], dtype=torch.float64)
    raw = head.targets(returns).unsqueeze(-1)
    torch.testing.assert_close(head.values(raw), returns, rtol=1e-10, atol=1e-12)
    assert float(head.targets(returns).abs().max()) < 150.0


@pytest.mark.parametrize("transform", [None, TRANSFORM])
def test_value_support_makes_a_categorical_critic(transform):
    """Values are expectations over integers, and targets are split between two integers."""
    low, high = -3, 4
    head = ValueHead(transform, (low, high))
    assert head.output_size == 8
    logits = torch.from_numpy(RNG.standard_normal((6, 8)))
    h = slow_transform if transform else float
    targets = head.targets(torch.from_numpy(TARGETS))
    expected = slow_two_hot_loss(logits.tolist(), [h(x) for x in TARGETS], low, high)
    loss = head.loss(logits, targets, targets)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert torch.equal(head.loss(logits, targets, targets + 5.0, 0.1), loss)  # nothing is clipped
    values = head.values(logits)
    for row, value in zip(logits.tolist(), values.tolist(), strict=True):
        total = sum(math.exp(x) for x in row)
        mean = sum((low + k) * math.exp(x) / total for k, x in enumerate(row))
        assert (slow_transform(value) if transform else value) == pytest.approx(mean, rel=1e-9)


def test_leading_dimensions_are_kept():
    """Values have the shape of the rollout."""
    assert ValueHead(TRANSFORM).values(torch.zeros(4, 3, 1)).shape == (4, 3)
    assert ValueHead(None, (-1, 1)).values(torch.zeros(4, 3, 3)).shape == (4, 3)


def test_value_head_is_built_from_config():
    """Transform and support are read from the configuration."""
    node = {"_target_": "maze_train.ReduceScaleValueTransform", "epsilon": 0.5}
    head = ValueHead.from_config(ModelConfig(value_transform=node, value_support=[-2, 2]))
    assert head.transform == ReduceScaleValueTransform(0.5)
    assert head.support == (-2, 2)
    assert ValueHead.from_config(ModelConfig()).transform is None


def test_unknown_value_transform_raises():
    """An unknown transform raises an error with its key."""
    config = ModelConfig(value_transform={"_target_": "maze_train.ReduceScaleValueTransfrom"})
    with pytest.raises(ConfigError, match=r"model.value_transform._target_ = .*did you mean"):
        ValueHead.from_config(config)


class Cubed:
    """h(x) = x³, without the base class."""

    def transform_value(self, x):
        return x**3

    def transform_value_inv(self, x):
        return x.sign() * x.abs() ** (1 / 3)


class WithoutInverse:
    transform_value = Cubed.transform_value


class Falling(Cubed):
    def transform_value(self, x):
        return -x


class WrongInverse(Cubed):
    def transform_value_inv(self, x):
        return x / 3


class OfPositiveReturns(Cubed):
    def transform_value(self, x):
        return x.log()


class OfOneNumber(Cubed):
    def transform_value(self, x):
        return float(x)


class Summed(Cubed):
    def transform_value_inv(self, x):
        return x.sum()


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (WithoutInverse, "methods transform_value and transform_value_inv, .* a WithoutInverse"),
        (Falling, "transform_value must be increasing"),
        (WrongInverse, r"must be the inverse of transform_value; it maps the returns .* to \[-333"),
        (OfPositiveReturns, "transform_value must return .* finite values; it maps .* to .*nan"),
        (OfOneNumber, r"transform_value\(\[-10.0, .*\]\) raised"),
        (Summed, "transform_value_inv must return a tensor of the same shape"),
    ],
)
def test_invalid_value_transforms_raise_with_an_example(cls, message):
    """A transform that is not increasing or has a wrong inverse raises an error with an example."""
    config = ModelConfig(value_transform={"_target_": f"{__name__}.{cls.__name__}"})
    with pytest.raises(ConfigError, match=f"^model.value_transform: .*{message}"):
        ValueHead.from_config(config)


def test_custom_value_transform_requires_two_methods_only():
    """A transform only requires two methods."""
    config = ModelConfig(value_transform={"_target_": f"{__name__}.Cubed"})
    assert isinstance(ValueHead.from_config(config).transform, Cubed)
