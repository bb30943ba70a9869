"""Settings of the policy and critic networks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from maze_train.core.checks import check_at_least, check_between, check_fields
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError

MAX_UNITS, MAX_LAYERS = 16_384, 64
"""Upper limits of network sizes. Larger networks require gigabytes of memory and take minutes to
initialize."""
ACTIVATIONS = ("tanh", "relu", "elu", "gelu", "silu", "leaky_relu")


@dataclass(kw_only=True)
class RecurrentConfig(Settings):
    """Recurrent layers between the hidden layers and the output layers."""

    network_class: ClassVar[str] = "maze_train.nets.recurrent.RecurrentNetwork"
    """Import path of the recurrent layers."""

    cell: Literal["lstm", "gru"] = "lstm"
    """Type of the recurrent cell."""

    size: int = 128
    """Number of units per recurrent layer, in [1, 16384]."""

    layers: int = 1
    """Number of stacked recurrent layers, in [1, 64]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "size", maximum=MAX_UNITS)
        check_fields(self, 1, "layers", maximum=MAX_LAYERS)


@dataclass(kw_only=True)
class ObservationNormalizationConfig(Settings):
    """Normalization of observations to mean 0 and standard deviation 1, elementwise per key.

    Images (uint8), discrete observations and action masks are not normalized.
    """

    mode: Literal["none", "running", "estimated"] = "none"
    """Source of the statistics. `running`: all training observations so far; `estimated`: steps of
    the untrained policy before training, then frozen; `none`: no normalization."""

    n_steps: int | None = None
    """Minimum number of environment steps of the untrained policy before training, used to estimate
    or initialize the statistics (>= 1); null: 10000 for `estimated`, 1000 for `running`."""

    clip: float = 10.0
    """Clip range of normalized observations, > 0; 0: no clipping."""

    exclude: list[str] = field(default_factory=list)
    """Keys of a Dict observation (nested keys joined by `/`) that are not normalized."""

    @property
    def initial_steps(self) -> int:
        """Value of `n_steps`, or the default value if `n_steps` is null."""
        return self.n_steps or (10_000 if self.mode == "estimated" else 1_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_steps is not None:
            check_at_least("n_steps", self.n_steps, 1)
        check_at_least("clip", self.clip, 0.0)


@dataclass(kw_only=True)
class ModelConfig(Settings):
    """Settings of policy and critic networks: templates for the spaces, or custom networks."""

    hidden_sizes: list[int] | None = None
    """Number of units of each hidden layer of the policy, and of the critic unless
    `critic_hidden_sizes` is set. null: `[512]` if observations contain images, otherwise
    `[256, 256]` for SAC and TD3, and `[64, 64]` for all other algorithms."""

    critic_hidden_sizes: list[int] | None = None
    """Number of units of each hidden layer of the critic; null: the same as for the policy."""

    activation: Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"] | None = None
    """Nonlinearity after each hidden layer. null: relu for algorithms with replay (SAC, TD3, DQN)
    or if observations contain images, otherwise tanh."""

    shared_trunk: bool | None = None
    """Whether policy and critic share all hidden layers (one trunk, two heads). null: false for
    algorithms with replay (SAC, TD3, DQN); otherwise true if `rnn` is set or observations contain
    images, unless `policy`, `critic` or `critic_hidden_sizes` is set or `hidden_sizes` is `[]`."""

    centralized_critic: bool | None = None
    """Whether the critic uses the observations of all agents, as in MAPPO (Yu et al., 2021); the
    policy uses only the observation of its agent. Supported by multi-agent A2C, PPO and IMPALA.
    null: false."""

    critic_obs: list[str] | None = None
    """Keys of a Dict observation (nested keys joined by `/`) that are hidden from the policy, such
    as privileged simulator state (Pinto et al., 2017, arXiv:1710.06542). The key of a nested Dict
    selects all leaves of the Dict. The critic uses all keys. Supported by A2C, PPO and IMPALA;
    policies without a critic ignore these keys. null: no keys are hidden."""

    image_encoder: Literal["nature", "impala", "flat"] = "nature"
    """Encoder of images (a uint8 Box of two to four dimensions; the first of four dimensions counts
    frames): `nature`: three convolutions (Mnih et al., 2015); `impala`: a residual network
    (Espeholt et al., 2018); `flat`: pixels as one vector. With `nature`, images with a side below
    36 pixels are encoded with smaller convolutions."""

    rnn: RecurrentConfig | None = None
    """Recurrent layers after the hidden layers, such as `{cell: lstm, size: 128}`. null: none."""

    normalization: ObservationNormalizationConfig = field(
        default_factory=ObservationNormalizationConfig
    )
    """Normalization of observations."""

    branch_size: int = 64
    """Number of units, in [1, 16384], of the layer for each key of a Dict observation, before the
    branches are concatenated. The branch of an image has four times as many units."""

    orthogonal_init: bool | None = None
    """Whether to use orthogonal weights and zero biases (gains: sqrt(2) for hidden layers, 0.01 for
    the policy head, 1 for the value head and `impala`); false: PyTorch's defaults. null: false for
    algorithms with replay, otherwise true."""

    distributions: dict[str, Any] = field(default_factory=dict)
    """Action distribution by space type or by key of a Dict action space: a name (categorical,
    multi_categorical, bernoulli, diagonal_gaussian, squashed_gaussian, beta), a mapping
    `{name: squashed_gaussian, state_dependent_std: false}`, or
    `{_target_: my_package.MyDistribution}`."""

    policy: dict[str, Any] | None = None
    """Custom policy network, `{_target_: my_package.MyNet, key: value}`. The class is called with
    `observation_space` and `output_size`, and the network maps observations to
    `[..., output_size]`. null: a template network."""

    critic: dict[str, Any] | None = None
    """Custom critic network, called with the same arguments as `policy`. For SAC and TD3, the class
    is also called with `action_size`, and the network maps observations and action features to
    `[..., output_size]`. null: a template network."""

    trunk: dict[str, Any] | None = None
    """Custom shared trunk. The class is called with `observation_space` and `output_size` (the last
    entry of `hidden_sizes`); requires `shared_trunk: true`. null: a template network."""

    value_transform: dict[str, Any] | None = None
    """Transform of the value targets, such as
    `{_target_: maze_train.ReduceScaleValueTransform, epsilon: 0.001}`. null: none."""

    value_support: list[int] | None = None
    """`[low, high]`: the critic predicts a categorical distribution over the integers in this range
    (after `value_transform`) instead of a scalar. null: a scalar."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"hidden_sizes": self.hidden_sizes, "critic_hidden_sizes": self.critic_hidden_sizes}
        for name, found in sizes.items():
            for i, size in enumerate(found or ()):
                check_between(f"{name}[{i}]", size, 1, MAX_UNITS)
        check_fields(self, 1, "branch_size", maximum=MAX_UNITS)
        self._check_networks()
        if self.centralized_critic and self.shared_trunk:
            problem = "a centralised critic shares no layers with the policy; remove this setting"
            raise ConfigError("shared_trunk", problem, True)
        if self.critic_obs and self.shared_trunk:
            problem = (
                "with critic_obs, the critic shares no layers with the policy; remove this setting"
            )
            raise ConfigError("shared_trunk", problem, True)
        if self.critic_obs and self.centralized_critic:
            problem = "a centralised critic uses all observations; remove one of the two settings"
            raise ConfigError("critic_obs", problem, self.critic_obs)
        if self.value_support is not None and (
            len(self.value_support) != 2 or self.value_support[0] >= self.value_support[1]
        ):
            raise ConfigError(
                "value_support", "expected [low, high] with low < high", self.value_support
            )

    def shortened(self) -> ModelConfig:
        """Return a copy for a dry run, which collects observation statistics in one step."""
        return replace(self, normalization=replace(self.normalization, n_steps=1))

    def _check_networks(self) -> None:
        networks = {"policy": self.policy, "critic": self.critic, "trunk": self.trunk}
        for name, node in (*networks.items(), ("value_transform", self.value_transform)):
            if node is not None and "_target_" not in node:
                raise ConfigError(name, "expected a mapping with the key _target_, or null", node)
        shares = self.shared_trunk or self.rnn is not None
        has_own_critic = bool(self.centralized_critic or self.critic_obs)
        if self.rnn is not None and self.shared_trunk is False:
            raise ConfigError("shared_trunk", "recurrent layers belong to a shared trunk", False)
        if self.critic_hidden_sizes is not None and shares and not has_own_critic:
            raise ConfigError(
                "critic_hidden_sizes",
                "with a shared trunk the critic has no separate layers; remove this setting",
                self.critic_hidden_sizes,
            )
        if self.trunk is not None and not shares:
            raise ConfigError("trunk", "requires model.shared_trunk=true")
        if shares:
            remedy = "" if self.rnn is not None else ", or set model.shared_trunk=false"
            for name in ("policy",) if has_own_critic else ("policy", "critic"):
                if networks[name] is not None:
                    raise ConfigError(
                        name,
                        "with a shared trunk each head is a single layer; set your network as "
                        f"model.trunk{remedy}",
                    )
            if self.hidden_sizes == []:
                raise ConfigError("hidden_sizes", "a shared trunk needs at least one layer", [])
