"""Gymnasium's interface of vector environments: calls, errors, and infos as arrays with masks.

Vector environments of maze_train return infos in this format; adapters parse it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import VectorEnv

from maze_train.core.conversion import Scalar
from maze_train.core.errors import EnvError, ShapeError, SpaceError, WorkerError
from maze_train.core.step_end import DROPPED, StepBatch, is_transition

if TYPE_CHECKING:
    from maze_train.core.types import Array
    from maze_train.envs.types import Mask


class ArgumentError(ShapeError, ValueError, TypeError):
    """Wrong number, shape or type of values; also the built-in errors that Gymnasium raises."""


class PendingCallError(EnvError, AlreadyPendingCallError):
    """A call between `step_async` and `step_wait`."""

    def __init__(self, message: str, name: str = "step") -> None:
        super().__init__(message, name)


class NoCallError(EnvError, NoAsyncCallError):
    """A call of `step_wait` without `step_async`."""

    def __init__(self, message: str, name: str = "step") -> None:
        super().__init__(message, name)


class ClosedError(WorkerError, ClosedEnvironmentError):
    """A vector environment is used after `close`."""


class MissingAttributeError(EnvError, AttributeError):
    """An environment has no attribute of the requested name."""


class CallableEnvs(VectorEnv[Any, Any, Any], ABC):
    """Calls of the single environments of a vector environment, as in Gymnasium."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; call between steps.

        Args:
            name: Name of the method or attribute of the environment or one of its wrappers.
            *args: Arguments of the method.
            **kwargs: Keyword arguments of the method.

        Returns:
            One result per environment.

        Raises:
            AttributeError: If an environment has no such attribute; nothing is called then.
            EnvError: If calls are not supported; a WorkerError if the call fails in a worker.
        """
        self._check_not_stepping(f"call({name!r})")
        return tuple(self._call_envs(name, args, kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment; see `call`."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment; call between steps.

        Restarted workers and restored states do not repeat the change; `run.set_env_attr` in a
        callback does.

        Args:
            name: Name of the attribute.
            values: One value per environment as a list or tuple, or one value for all.

        Raises:
            ShapeError: If the number of values differs from the number of environments.
            EnvError: See `call`.
        """
        self._check_not_stepping(f"set_attr({name!r})")
        every = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(every) != self.num_envs:
            raise ArgumentError(f"set_attr: {len(every)} values for {self.num_envs} environments")
        self._set_attrs(name, every)

    def render(self) -> tuple[Any, ...]:
        """Return the rendered frame of every environment."""
        return self.call("render")

    def _call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Call a method of every environment."""
        raise EnvError(f"call({name!r}): not supported by {type(self).__name__}")

    def _set_attrs(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""
        raise EnvError(f"set_attr({name!r}): not supported by {type(self).__name__}")

    @abstractmethod
    def _check_not_stepping(self, call: str) -> None:
        """Raise EnvError between `step_async` and `step_wait`, and after `close`."""


def checked_seed(seed: object) -> int:
    """Return a seed as an integer >= 0.

    Raises:
        SpaceError: If the seed is not an integer >= 0.
    """
    if not isinstance(seed, (int, np.integer)) or seed < 0:
        raise SpaceError(f"reset(seed={seed!r}): expected an integer >= 0, or None")
    return int(seed)


def masked_rows(
    options: Mapping[str, Any] | None, num_envs: int
) -> tuple[list[int] | None, dict[str, Any] | None]:
    """Return the indices selected by `options["reset_mask"]` (None: no mask), and other options.

    Raises:
        ArgumentError: If the mask is not a bool array [num_envs] with at least one True value.
    """
    if options is None or "reset_mask" not in options:
        return None, None if options is None else dict(options)
    mask = np.asarray(options["reset_mask"])
    problem = None
    if mask.shape != (num_envs,):
        problem = f"have shape `({num_envs},)`, got {mask.shape}"
    elif mask.dtype != np.bool_:
        problem = f"have `dtype=np.bool_`, got {mask.dtype}"
    elif not mask.any():
        problem = f"contain a boolean array with at least one True value, got reset_mask={mask}"
    if problem is not None:
        raise ArgumentError(f"`options['reset_mask']` must {problem}")
    rest = {key: value for key, value in options.items() if key != "reset_mask"}
    return mask.nonzero()[0].tolist(), rest


def infos_of(batch: StepBatch[Array], num_envs: int) -> dict[str, Any]:
    """Return the infos of a step in Gymnasium's format for SAME_STEP."""
    ends = []
    final: Any = batch.final_obs
    for end in batch.ends:
        info = end.info
        if end.counted is not None:
            info = {"episode": dict(zip("rl", end.counted, strict=True)), **info}
        row = (
            {key: column[end.env].copy() for key, column in final.items()}
            if isinstance(final, dict)
            else final[end.env].copy()
        )
        ends.append((end.env, {"final_obs": row, "final_info": info}))
    infos = columns_of(batch.infos, num_envs) | columns_of(ends, num_envs)
    if batch.has_gaps:
        infos["ignored"] = ~is_transition(batch.end)
        if (lost := batch.end == DROPPED).any():
            infos["lost"] = lost
    return {**(batch.columns or {}), **infos}


def columns_of(rows: Iterable[tuple[int, Mapping[Any, Any]]], num_envs: int) -> dict[Any, Any]:
    """Combine infos into one array per key and a mask under `_key`, preserving the nesting.

    If the values of a key differ in type or shape, the array has dtype object. A key that collides
    with the name of a mask is omitted.

    Args:
        rows: Pairs of environment index and info.
        num_envs: Number of environments.
    """
    given: dict[Any, dict[int, Any]] = {}
    for env, info in rows:
        for key, value in info.items():
            given.setdefault(key, {})[env] = value
    infos: dict[Any, Any] = {}
    for key, values in given.items():
        if str(key)[:1] != "_" or str(key)[1:] not in given:
            infos[key] = _column(values, num_envs, as_objects=key == "final_obs")
            infos[f"_{key}"] = mask = np.zeros(num_envs, np.bool_)
            mask[list(values)] = True
    return infos


def _column(values: Mapping[int, Any], num_envs: int, as_objects: bool) -> object:
    """Return the values of one key, by environment, as an array or as nested arrays."""
    if not as_objects and all(isinstance(value, dict) for value in values.values()):
        return columns_of(values.items(), num_envs)
    column = np.full(num_envs, None, dtype=object)
    if not as_objects and all(_is_number(value) for value in values.values()):
        arrays = [np.asarray(value) for value in values.values()]
        dtypes = {array.dtype for array in arrays}
        are_numbers = all(dtype.kind in "biufc" for dtype in dtypes)
        if len({array.shape for array in arrays}) == 1 and (are_numbers or len(dtypes) == 1):
            column = np.zeros((num_envs, *arrays[0].shape), np.result_type(*dtypes))
    for env, value in values.items():
        column[env] = value
    return column


def _is_number(value: object) -> bool:
    """Whether Gymnasium stores a value in a numeric array."""
    if type(value) is int:
        return abs(value) < 2**63
    return type(value) in (float, bool) or isinstance(value, (np.number, np.ndarray))


def infos_by_key(infos: Iterable[Any], num_envs: int) -> dict[Any, Any]:
    """Return infos in Gymnasium's format, from this format or from one dict per environment."""
    return dict(infos) if isinstance(infos, Mapping) else columns_of(enumerate(infos), num_envs)


def info_of(infos: Mapping[Any, Any] | Sequence[Any], i: int, num_envs: int) -> dict[str, Any]:
    """Extract the info of environment i from Gymnasium's infos.

    Args:
        infos: One array or tensor per key, nested for dicts, with the mask of environments that
            have a value under `_key`; or one dict per environment.
        i: Index of the environment.
        num_envs: Number of environments.
    """
    if not isinstance(infos, Mapping):
        return dict(infos[i]) if isinstance(infos[i], Mapping) else {}
    found = {}
    arrays: dict[Any, Any] = {
        key: np.asarray(value) if isinstance(value, Scalar) and value.shape else value
        for key, value in infos.items()
    }
    for key, value in arrays.items():
        mask = arrays.get(f"_{key}")
        is_given = not is_mask(mask, num_envs) or mask[i]
        names_mask = str(key)[:1] == "_" and str(key)[1:] in infos and is_mask(value, num_envs)
        if is_given and not names_mask:
            if isinstance(value, Mapping):
                value = info_of(value, i, num_envs)
            found[key] = value[i] if np.shape(value)[:1] == (num_envs,) else value
    return found


def is_mask(value: object, num_envs: int) -> TypeGuard[Mask]:
    """Whether a value of Gymnasium's infos has the dtype and shape of a mask."""
    return isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (num_envs,)
