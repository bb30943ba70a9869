"""Places where workers can live: each gives pools of them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from maze_train.core.errors import ConfigError
from maze_train.workers.pool import InlinePool, MakeWorker, WorkerPool

if TYPE_CHECKING:
    from maze_train.workers.remote import RemotePlace


class Place(Protocol):
    """Somewhere workers can live."""

    @property
    def may_restart(self) -> bool:
        """Whether a worker that fails may be started again."""
        ...

    def num_workers(self, at_most: int) -> int:
        """Number of workers that share a task of that many equal parts, in [1, at_most]."""
        ...

    def pool(
        self, make_workers: Sequence[MakeWorker], names: Sequence[str], calls: Mapping[str, str]
    ) -> WorkerPool:
        """A pool of workers; the caller closes it.

        Args:
            make_workers: Makes the workers, one function each.
            names: Names of the workers in messages.
            calls: Names of calls in messages, by method.
        """
        ...

    def for_learners(self) -> RemotePlace | None:
        """The place for learners in addition to the first one; None: processes of this machine."""
        ...


class ThisProcess:
    """The calling process, with a single worker."""

    may_restart = False

    def num_workers(self, at_most: int) -> int:
        """One."""
        return 1

    def pool(
        self, make_workers: Sequence[MakeWorker], names: Sequence[str], calls: Mapping[str, str]
    ) -> WorkerPool:
        """A pool of workers in this process."""
        return InlinePool(make_workers)

    def for_learners(self) -> None:
        """Processes of this machine."""


T = TypeVar("T", covariant=True)


class Portable(Generic[T]):
    """Something that may have to go to another process; lambdas and local classes are fine.

    Args:
        value: The value.
        key: Name of the setting that it comes from, for the message if it cannot be sent.
    """

    def __init__(self, value: T, key: str) -> None:
        self.value, self.key = value, key

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle  # Imported here, since only worker processes and their parents need it.

        try:
            content = cloudpickle.dumps(self.value)
        except Exception as error:
            raise ConfigError(
                self.key,
                f"cannot be sent to a worker process ({error}): create what cannot be sent "
                "within the function, or use runner=dev",
            ) from error
        return _unpacked, (content, self.key)


def _unpacked(content: bytes, key: str) -> Portable[Any]:
    return Portable(pickle.loads(content), key)
