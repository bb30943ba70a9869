"""Settings of the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from maze_train.core.checks import check_at_least
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError
from maze_train.core.targets import check_trusted, is_target

SIMULATORS = ("brax", "gymnax", "playground")
"""Id prefixes of simulators."""


@dataclass(kw_only=True)
class EnvConfig(Settings):
    """Environment to train on: a registered id, or a custom class or function."""

    atari_games: ClassVar[str] = "maze_train.envs.atari.AtariGames"
    """Class that preprocesses Atari games; loaded only if needed for the id or `preprocessing`."""

    pettingzoo: ClassVar[str] = "maze_train.envs.pettingzoo.PettingZoo"
    """Adapter of PettingZoo environments; loaded only if needed for the id or the target."""

    id: str | None = None
    """Registered Gymnasium id, such as `CartPole-v1` or `ALE/Pong-v5`. `my_module:MyEnv-v0` imports
    the module first. `pettingzoo:classic/tictactoe_v3` selects a PettingZoo environment (extra
    `pettingzoo`); `brax:ant`, `gymnax:CartPole-v1` and `playground:CartpoleBalance` select JAX
    simulators (extra `jax`)."""
    target: str | None = None
    """Custom environment instead of `id`: dotted path of a class, or of a function that returns an
    environment; `_target_` in YAML."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`, of the target, or of the PettingZoo environment."""
    backend: Literal["gymnasium", "native", "envpool", "tensor"] = "gymnasium"
    """Implementation of vectorized environments. `gymnasium`: one object per environment, in this
    process or in workers; `native`: the vector environment registered under the id; `envpool`: the
    EnvPool environment with this name (extra `envpool`); `tensor`: a simulator that exchanges
    tensors, the default for ids of JAX simulators."""
    device: str | None = None
    """Device of a simulator (`env.backend=tensor`); null selects the device of the learner."""
    truncation: Literal["bootstrap_previous", "as_termination"] = "bootstrap_previous"
    """How to handle time limits if a simulator does not return final observations.
    `bootstrap_previous`: bootstrap from the value of the previous observation; `as_termination`: do
    not bootstrap."""
    preprocessing: Literal["auto", "atari", "none"] = "auto"
    """`atari`: standard Atari preprocessing (no-ops, frame skip 4, 84x84 greyscale, stack 4; in
    training only, the loss of a life ends an episode and rewards are replaced by their sign);
    `auto`: `atari` for `ALE/` ids with color screen observations, `none` for other environments;
    `none`: no preprocessing."""
    wrappers: list[dict[str, Any]] = field(default_factory=list)
    """Wrappers around the preprocessed environment, from the inside out, in training and
    evaluation. Each entry has the form `{_target_: dotted path, key: value}` and is called with the
    environment as its first argument. `{env_index}` in a text is replaced by the number of the
    environment, such as `train-0` or `eval-3`."""
    training_wrappers: list[dict[str, Any]] = field(default_factory=list)
    """Outer wrappers for training only, such as reward clipping. Reported training returns do not
    include the effect of these wrappers."""
    empty_mask: Literal["error", "all_legal"] = "error"
    """What to do if an action mask contains no legal action although the episode continues.
    `error`: raise an error; `all_legal`: treat all actions of this component as legal, in which
    case the environment must accept illegal actions (single-agent environments only)."""
    max_episode_steps: int | None = None
    """Maximum length of an episode in steps, or in turns for a multi-agent environment (>= 1).
    Steps are counted inside `wrappers`. null selects the registered limit, or no limit for a custom
    environment."""
    teams: dict[str, list[str]] = field(default_factory=dict)
    """Agents of each team, given as names or patterns (`{red: ["red_*"], blue: ["blue_*"]}`). The
    winner is the team with the largest sum of returns. If empty, the teams declared by the
    environment are used, if any."""

    def __post_init__(self) -> None:
        """Check the settings that can be checked without building the environment.

        Raises:
            ConfigError: If a value is out of range.
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
    def has_single_form(self) -> bool:
        """Whether single environments with one seed per episode are available."""
        return self.backend in ("gymnasium", "tensor")

    def check_named(self) -> None:
        """Check that the settings select exactly one environment with trusted arguments.

        Raises:
            ConfigError: If not exactly one environment is selected, an argument refers to
                untrusted code, or an argument repeats a setting.
        """
        check_trusted(self.kwargs)
        settings = {"max_episode_steps": self.max_episode_steps, "device": self.device}
        for name, setting in settings.items():
            if setting is not None and name in self.kwargs:
                problem = f"env.{name} = {setting!r} is set too; set one of them"
                raise ConfigError(f"env.kwargs.{name}", problem, self.kwargs[name])
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
