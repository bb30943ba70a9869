"""Pure tensor functions of papers: no modules, no configuration, no environments.

Tensors are time-major, [T, B, ...]: T steps of B environments.
"""

from maze_train.functional.evolution import (
    antithetic_gradient,
    centered_ranks,
    normalized_returns,
    shaped_returns,
)
from maze_train.functional.moments import Moments, batch_moments, merge_moments
from maze_train.functional.policy_loss import (
    approximate_kl,
    clip_fraction,
    clipped_surrogate_loss,
    policy_gradient_loss,
)
from maze_train.functional.returns import (
    backward_recurrence,
    discounts_and_lambdas,
    explained_variance,
    lambda_advantages,
    lambda_returns,
    normalize_advantages,
)
from maze_train.functional.schedules import linear_schedule, piecewise_linear
from maze_train.functional.shapes import check_same_shape
from maze_train.functional.value_loss import clipped_value_loss, squared_value_loss, two_hot_loss
from maze_train.functional.value_transforms import (
    IdentityValueTransform,
    LinearScaleValueTransform,
    ReduceScaleValueTransform,
    ValueTransform,
    scalar_to_support,
    support_to_scalar,
)
from maze_train.functional.vtrace import (
    VTraceFromLogitsReturns,
    VTraceReturns,
    from_importance_weights,
    from_logits,
    get_log_rhos,
    log_probs_from_logits_and_actions_and_spaces,
    vtrace,
)

__all__ = [
    "IdentityValueTransform",
    "LinearScaleValueTransform",
    "Moments",
    "ReduceScaleValueTransform",
    "VTraceFromLogitsReturns",
    "VTraceReturns",
    "ValueTransform",
    "antithetic_gradient",
    "approximate_kl",
    "backward_recurrence",
    "batch_moments",
    "centered_ranks",
    "check_same_shape",
    "clip_fraction",
    "clipped_surrogate_loss",
    "clipped_value_loss",
    "discounts_and_lambdas",
    "explained_variance",
    "from_importance_weights",
    "from_logits",
    "get_log_rhos",
    "lambda_advantages",
    "lambda_returns",
    "linear_schedule",
    "log_probs_from_logits_and_actions_and_spaces",
    "merge_moments",
    "normalize_advantages",
    "normalized_returns",
    "piecewise_linear",
    "policy_gradient_loss",
    "scalar_to_support",
    "shaped_returns",
    "squared_value_loss",
    "support_to_scalar",
    "two_hot_loss",
    "vtrace",
]
