"""Action distributions: families bound to one action space, as functions of their parameters."""

from __future__ import annotations

from maze_train.distributions.base import Distribution
from maze_train.distributions.bernoulli import Bernoulli
from maze_train.distributions.beta import Beta
from maze_train.distributions.categorical import Categorical, MultiCategorical
from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.distributions.joint import JointDistribution
from maze_train.distributions.mapping import DistributionTable, distribution_for
from maze_train.distributions.soft import SoftActions, SoftSample
from maze_train.distributions.truncated_gaussian import TruncatedGaussian

__all__ = [
    "Bernoulli",
    "Beta",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "DistributionTable",
    "JointDistribution",
    "MultiCategorical",
    "SoftActions",
    "SoftSample",
    "SquashedGaussian",
    "TruncatedGaussian",
    "distribution_for",
]
