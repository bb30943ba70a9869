"""Settings of the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from maze_train.core.checks import check_at_least
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError
from maze_train.core.targets import is_target

SIMULATORS = ("brax", "gymnax", "playground")
"""First parts of ids that name simulators."""


@dataclass(kw_only=True)
class EnvConfig(Settings):
    """Environment to train on: a registered id, or your own class or function."""

    atari_games: ClassVar[str] = "maze_train.envs.atari.AtariGames"
    """Preprocesses games, where the prefix of the id or `preprocessing` asks for it."""

    id: str | None = None
    """Registered gymnasium id, such as `CartPole-v1` or `ALE/Pong-v5`; `my_module:MyEnv-v0` imports
    the module first; `pettingzoo:classic/tictactoe_v3` is an environment of PettingZoo (extra
    `pettingzoo`); `brax:ant`, `gymnax:CartPole-v1` and `playground:CartpoleBalance` are simulators
    of JAX (extra `jax`)."""
    target: str | None = None
    """Own environment instead of `id`: dotted path of a class, or of a function that returns one;
    `_target_` in YAML."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for `gymnasium.make`, for the target, or for PettingZoo's function."""
    backend: Literal["gymnasium", "native", "envpool", "tensor"] = "gymnasium"
    """Implementation that steps many environments: `gymnasium`: one object per environment, in this
    process or in workers, as the runner says; `native`: the vector environment that is registered
    under the id; `envpool`: EnvPool's environment of that name (extra `envpool`); `tensor`: a
    simulator that gives and takes tensors, as ids of JAX always are."""
    device: str | None = None
    """Device of a simulator (`env.backend=tensor`); null: that of the learner."""
    truncation: Literal["bootstrap_previous", "as_termination"] = "bootstrap_previous"
    """What a time limit means where a simulator does not give the last observation of the episode:
    `bootstrap_previous`: the value of the observation before stands in for that of the last one;
    `as_termination`: nothing is expected after it."""
    preprocessing: Literal["auto", "atari", "none"] = "auto"
    """`atari`: the standard preprocessing of Atari games (no-ops, skip 4, 84x84 grey, stack 4; in
    training only, the loss of a life ends an episode and rewards are signs); `auto`: that for
    `ALE/` ids that observe the screen in colour, nothing for others; `none`: nothing."""
    wrappers: list[dict[str, Any]] = field(default_factory=list)
    """Wrappers around the preprocessed environment, from the inside out: `{_target_: dotted path,
    key: value}` each, called with the environment first. In training and evaluation."""
    training_wrappers: list[dict[str, Any]] = field(default_factory=list)
    """Wrappers outside of these, in training only, such as clipped rewards. Returns of training are
    reported as they are without them."""
    empty_mask: Literal["error", "all_legal"] = "error"
    """What to do if an action mask rules out every action while the episode continues: `error`: the
    run ends; `all_legal`: all actions of that choice are legal, and the environment decides what
    they do (environments with one agent only)."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated, >= 1 (inside of `wrappers`), turns where there are
    several agents; null: as registered, and no limit for an own environment."""
    teams: dict[str, list[str]] = field(default_factory=dict)
    """Agents of each team, by any name: names of agents, or patterns (`{red: ["red_*"], blue:
    ["blue_*"]}`). Members of a team are not opponents: who won is decided by the sum of their
    returns. Empty: the teams of the environment, or none."""

    def __post_init__(self) -> None:
        """Check what can be checked before the environment is built.

        Raises:
            ConfigError: If a value is out of its range.
        """
        super().__post_init__()
        if (self.id or "").partition(":")[0] in SIMULATORS and self.backend == "gymnasium":
            self.backend = "tensor"
        if self.device is not None and self.backend != "tensor":
            problem = "is for simulators (env.backend=tensor); leave it out"
            raise ConfigError("device", problem, self.device)
        if self.max_episode_steps is not None:
            check_at_least("max_episode_steps", self.max_episode_steps, 1)
        if self.teams and self.backend != "gymnasium":
            problem = f"environments of env.backend={self.backend} have one agent; leave it out"
            raise ConfigError("teams", problem, list(self.teams))
        check_wrappers("wrappers", self.wrappers)
        check_wrappers("training_wrappers", self.training_wrappers)

    @property
    def maker(self) -> str | None:
        """Dotted path of what makes single environments of this backend; None: gymnasium."""
        return "maze_train.envs.simulated.make_simulator_env" if self.backend == "tensor" else None

    @property
    def has_single_form(self) -> bool:
        """Whether there are single environments, which take one seed per episode."""
        return self.backend in ("gymnasium", "tensor")

    def check_named(self) -> None:
        """Refuse settings that name no environment, or two.

        Raises:
            ConfigError: If they do.
        """
        if (self.id is None) == (self.target is None):
            raise ConfigError(
                "env", f"expected exactly one of id ({self.id}) and _target_ ({self.target})"
            )


def check_wrappers(name: str, wrappers: Sequence[Any]) -> None:
    """Raise ConfigError if a wrapper is not a mapping with a dotted path."""
    for i, wrapper in enumerate(wrappers):
        if not is_target(wrapper):
            problem = "expected a mapping with the key `_target_`, the dotted path of the wrapper"
            raise ConfigError(f"{name}[{i}]", problem, wrapper)
