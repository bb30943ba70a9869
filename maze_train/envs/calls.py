"""Method calls and attribute changes of environments during a run."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import gymnasium
import numpy as np

from maze_train.core.errors import ConfigError, EnvError, did_you_mean, nearest
from maze_train.core.notices import warn
from maze_train.core.state import plain_copy

CALL_ENVS = "run.call_envs"

MANY_CALLS = 1_000
"""Number of calls above which a warning is printed."""

OWNED = frozenset(("reset", "step", "render", "close", "state_dict", "load_state_dict"))
"""Methods reserved for maze_train."""

FORWARDING = frozenset(
    ("call", "call_async", "get_attr", "get_wrapper_attr", "set_attr", "set_wrapper_attr")
)
"""Gymnasium methods that access an attribute by name; that name would not be checked."""

UNLISTED = frozenset((*dir(gymnasium.Wrapper), *dir(gymnasium.vector.VectorWrapper), *OWNED))
"""Attributes of every environment; omitted from lists in messages."""

DRAWS = (
    "samples from the random generator of the environment, so it cannot be repeated when the "
    "environment is restored: sample in reset(), or add state_dict() and load_state_dict(state) "
    "to the environment and all its wrappers"
)


@dataclass(frozen=True)
class EnvCall:
    """Method call or attribute change, applied to every environment."""

    name: str
    """Name of the method or attribute."""
    args: list[Any] = field(default_factory=list)
    """Positional arguments of the method, or the new value of the attribute."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments."""
    is_attribute: bool = False
    """Whether to set an attribute instead of calling a method."""
    only_checks: bool = False
    """Whether to only check that the environment has the method or attribute."""
    key: str = CALL_ENVS
    """Origin of the call, for messages."""

    def checked(self) -> EnvCall:
        """Validate the call, and return a copy of it.

        Raises:
            ConfigError: If the name is not allowed, or an argument is not a plain value.
        """
        if problem := self._refusal():
            raise ConfigError(self.key, problem, self.name)
        try:
            args, kwargs = self._arguments()
        except EnvError as error:
            raise ConfigError(self.key, str(error), self.name) from error
        return replace(self, args=args, kwargs=kwargs)

    def _refusal(self) -> str:
        """Return the reason why the name is not allowed; empty if the name is allowed."""
        if not self.name.isidentifier():
            return "expected the name of a method or attribute, without dots"
        if self.name in OWNED:
            return "this method is reserved for maze_train"
        if self.name in FORWARDING:
            return "give the name itself; environments within others are searched as well"
        # Attributes of wrappers such as `_max_episode_steps` may be set to plain values.
        if self.name.startswith("__" if self.is_attribute else "_"):
            return "private; expected a public name"
        return ""

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = [*self.args], {**self.kwargs}
        return plain_copy(args, "args"), plain_copy(kwargs, "kwargs")

    def make(self, env: object, may_draw: bool = True) -> None:
        """Call the method of the outermost wrapper that has the method, or of the environment.

        Args:
            env: The environment, or any object that has the wrapped environment as attribute `env`.
            may_draw: Whether the call may sample from random generators of the environment.

        Raises:
            ConfigError: If the method or attribute does not exist, or the call samples from a
                random generator.
        """
        layers = list(layers_of(env))
        owner = next((layer for layer in layers if self._is_in(layer)), None)
        if owner is None:
            raise self.unknown(layers)
        if self.only_checks:
            return
        args, kwargs = self._arguments()  # Copied, because environments may modify arguments.
        before = b"" if may_draw else generator_states(layers)
        if self.is_attribute:
            setattr(owner, self.name, args[0])
        else:
            getattr(owner, self.name)(*args, **kwargs)
        if not may_draw and generator_states(layers) != before:
            raise ConfigError(self.key, DRAWS, self.name)

    def make_in_vector(self, env: object, num_envs: int) -> None:
        """Call the method of a third-party vector environment, or of each of its environments.

        Args:
            env: A vector environment. Single environments are accessed through `call` and
                `set_attr` of `gymnasium.vector`.
            num_envs: Number of environments.

        Raises:
            ConfigError: If the method or attribute does not exist.
        """
        layers = list(layers_of(env))
        inner = layers[-1]
        if any(map(self._is_in, layers)) or not isinstance(inner, CallableSingleEnvs):
            self.make(env)
        elif not all(inner.call("has_wrapper_attr", self.name)):
            raise self.unknown([*layers, *getattr(inner, "envs", [])[:1]])
        elif not self.only_checks:
            args, kwargs = self._arguments()
            if self.is_attribute:
                inner.set_attr(self.name, args * num_envs)
            else:
                inner.call(self.name, *args, **kwargs)

    def _is_in(self, layer: object) -> bool:
        if self.is_attribute:  # Exclude methods that a wrapper forwards.
            return self.name in getattr(layer, "__dict__", {}) or hasattr(type(layer), self.name)
        return callable(getattr(layer, self.name, None))

    def unknown(self, layers: Sequence[Any]) -> ConfigError:
        """Return the error for a missing method or attribute, with a list of existing names."""
        every = [part for layer in layers for part in layers_of(layer)]
        kind = "attribute" if self.is_attribute else "method"
        known = sorted(
            {
                name
                for layer in every
                for name in (vars(layer) if self.is_attribute else dir(layer))
                if not name.startswith("_") and name not in UNLISTED
                if self.is_attribute or callable(getattr(layer, name, None))
            }
        )
        name, near = type(every[-1]).__name__, nearest(self.name, known)
        listed = f"; it has {', '.join(known)}" if known else ""
        problem = f"{name} and its wrappers have no such {kind}{did_you_mean(near)}{listed}"
        return ConfigError(self.key, problem, self.name)


@runtime_checkable
class CallableSingleEnvs(Protocol):
    """Vector environment with single environments, such as Gymnasium's `SyncVectorEnv`."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> Sequence[Any]:
        """Call a method of every environment, or read an attribute; return all results."""
        ...

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment."""
        ...


def layers_of(env: object) -> Iterator[Any]:
    """Yield an environment and all environments that it wraps, outermost first."""
    while env is not None:
        yield env
        env = getattr(env, "env", None)


def generator_states(layers: Sequence[Any]) -> bytes:
    """Return the states of all NumPy generators that are attributes of these environments."""
    values = [value for layer in layers for value in getattr(layer, "__dict__", {}).values()]
    found = [value for value in values if isinstance(value, np.random.Generator)]
    return b"".join(pickle.dumps(generator.bit_generator.state) for generator in found)


def new_calls(calls: Sequence[EnvCall], num_made: int) -> list[EnvCall]:
    """Return the calls after the first `num_made` calls.

    Raises:
        EnvError: If there are fewer than `num_made` calls.
    """
    if len(calls) < num_made:
        raise EnvError(
            f"an environment received {num_made} calls, but there are only {len(calls)}: calls "
            "cannot be undone; build new environments"
        )
    return list(calls[num_made:])


KINDS = MappingProxyType({name: type(value) for name, value in asdict(EnvCall("")).items()})
"""Types of the fields of a saved call."""


def calls_from(state: object) -> list[EnvCall]:
    """Return calls from a saved state.

    Raises:
        ConfigError: If a call is not allowed.
        EnvError: If the state is damaged, or from a version without calls.
    """
    found = []
    for call in state if isinstance(state, list) else [state]:
        if not isinstance(call, dict) or {k: type(v) for k, v in call.items()} != KINDS:
            problem = f"expected a list of calls, each with {', '.join(KINDS)}"
            raise EnvError(f"the calls of environments in the state are damaged: {problem}")
        found.append(EnvCall(**call).checked())
    return found


def calls_to_state(calls: Sequence[EnvCall]) -> list[dict[str, Any]]:
    """Return calls as plain values for a saved state."""
    return [asdict(call) for call in calls]


MakeCalls: TypeAlias = "Callable[[], object]"
"""Makes the calls of a list in `EnvCalls` that have not been made yet, and waits for them."""


def exact(value: object) -> object:
    """Return a value of a call with its arrays as bytes, so that `repr` is exact."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: exact(x) for key, x in value.items()}
    return type(value)(map(exact, value)) if isinstance(value, list | tuple) else value


class EnvCalls:
    """All environment calls of a run, in order. The calls are repeated in environments built later.

    Checkpoints do not contain calls that failed in an environment.

    Attributes:
        training: Calls made in training environments.
        evaluation: Calls made in evaluation environments.
        in_training_envs: Functions that make the calls of `training`, one per owner of
            environments.
        in_evaluation_envs: Functions that make the calls of `evaluation`.
        in_helpers: Functions that make the calls of `training` in environments of this process in
            which no episodes run.
    """

    def __init__(self) -> None:
        self.training: list[EnvCall] = []
        self.evaluation: list[EnvCall] = []
        self.in_training_envs: list[MakeCalls] = []
        self.in_evaluation_envs: list[MakeCalls] = []
        self.in_helpers: list[MakeCalls] = []
        self._added: list[tuple[EnvCall, bool]] = []

    def __bool__(self) -> bool:
        return bool(self.training)

    def add(self, call: EnvCall, *, evaluate: bool = False) -> None:
        """Add a call, to be made by the next `make`.

        Args:
            call: The call.
            evaluate: Whether evaluation environments receive the call as well.

        Raises:
            ConfigError: If the call is invalid, or the run has no training environments.
        """
        call = call.checked()
        if not (evaluate or self.in_training_envs):
            problem = "the run has no training environments; pass evaluate=True"
            raise ConfigError(call.key, problem, call.name)
        self._added.append((call, evaluate))

    @property
    def added(self) -> str:
        """Description of the added calls; different calls have different descriptions."""
        return repr([(exact(asdict(call)), evaluate) for call, evaluate in self._added])

    def make(self) -> None:
        """Make the added calls in all environments, between two updates.

        Raises:
            MazeTrainError: If a call fails; see `MazeVectorEnv.make_calls`. The added calls are
                then removed.
        """
        added, self._added = self._added, []
        if not added:
            return
        before = len(self.training), len(self.evaluation)
        self.training += [call for call, _ in added]
        self.evaluation += [call for call, evaluate in added if evaluate]
        try:
            for make_calls in (*self.in_training_envs, *self.in_helpers):
                make_calls()
            for make_calls in self.in_evaluation_envs if len(self.evaluation) > before[1] else ():
                make_calls()
        except BaseException:
            del self.training[before[0] :], self.evaluation[before[1] :]
            raise
        if before[0] < MANY_CALLS <= len(self.training):
            warn(
                f"{MANY_CALLS:,} environment calls so far: checkpoints store all calls, "
                "and each new environment repeats them; call less often"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return all calls as plain values."""
        return {
            "training": calls_to_state(self.training),
            "evaluation": calls_to_state(self.evaluation),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. The lists of calls are modified in place."""
        self.training[:] = calls_from(state.get("training"))
        self.evaluation[:] = calls_from(state.get("evaluation"))
        for make_calls in self.in_helpers:
            make_calls()
