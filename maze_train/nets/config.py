"""Settings of the policy and critic networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from maze_train.checks import check_at_least, check_one_of
from maze_train.errors import ConfigError

__all__ = ["ACTIVATIONS", "ModelConfig"]

ACTIVATIONS = ("tanh", "relu", "elu", "gelu", "silu", "leaky_relu")


@dataclass(kw_only=True)
class ModelConfig:
    """Networks built from the spaces of the environment, or named by `_target_`."""

    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """Units of each hidden layer of the policy, and of the critic unless it has its own sizes."""

    critic_hidden_sizes: list[int] | None = None
    """Units of each hidden layer of the critic; null: those of the policy."""

    activation: Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"] = "tanh"
    """Nonlinearity after each hidden layer."""

    shared_trunk: bool = False
    """Whether policy and critic share all hidden layers (one trunk, two heads)."""

    branch_size: int = 64
    """Units of the layer that reads one key of a Dict observation, before branches are joined."""

    orthogonal_init: bool = True
    """Orthogonal weights and zero biases (gains: sqrt(2) hidden, 0.01 policy head, 1 value head);
    false: the defaults of PyTorch."""

    distributions: dict[str, Any] = field(default_factory=dict)
    """Action distribution by space type or by key of a Dict action space. A value is a name
    (categorical, multi_categorical, diagonal_gaussian, squashed_gaussian), a mapping
    `{name: squashed_gaussian, state_dependent_std: false}`, or
    `{_target_: my_package.MyDistribution}`."""

    policy: dict[str, Any] | None = None
    """Own policy network, `{_target_: my_package.MyNet, key: value}`: called with
    `observation_space` and `output_size`, maps observations to `[..., output_size]`. null: a
    template network."""

    critic: dict[str, Any] | None = None
    """Own critic network, called like `policy`. null: a template network."""

    trunk: dict[str, Any] | None = None
    """Own shared trunk, called with `observation_space` and `output_size` (the last of
    `hidden_sizes`); needs `shared_trunk: true`. null: a template network."""

    value_transform: dict[str, Any] | None = None
    """Transform of the critic's targets, such as
    `{_target_: maze_train.ReduceScaleValueTransform, epsilon: 0.001}`. null: none."""

    value_support: list[int] | None = None
    """`[low, high]`: the critic predicts a categorical distribution over the integers of this range
    (of transformed values) instead of a scalar. null: a scalar."""

    def __post_init__(self) -> None:
        for name in ("hidden_sizes", "critic_hidden_sizes"):
            for i, size in enumerate(getattr(self, name) or ()):
                check_at_least(f"{name}[{i}]", size, 1)
        check_one_of("activation", self.activation, ACTIVATIONS)
        check_at_least("branch_size", self.branch_size, 1)
        self._check_networks()
        if self.value_support is not None and (
            len(self.value_support) != 2 or self.value_support[0] >= self.value_support[1]
        ):
            raise ConfigError(
                "value_support", "expected [low, high] with low < high", self.value_support
            )

    def _check_networks(self) -> None:
        for name in ("policy", "critic", "trunk", "value_transform"):
            node = getattr(self, name)
            if node is not None and "_target_" not in node:
                raise ConfigError(name, "expected a mapping with the key _target_, or null", node)
        if self.trunk is not None and not self.shared_trunk:
            raise ConfigError("trunk", "needs model.shared_trunk=true")
        if self.shared_trunk:
            for name in ("policy", "critic"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        name,
                        "a shared trunk has heads of one layer only; name your network "
                        "model.trunk, or set model.shared_trunk=false",
                    )
            if not self.hidden_sizes:
                raise ConfigError("hidden_sizes", "a shared trunk needs at least one layer", [])
