"""Values that may have to go to another process."""

from __future__ import annotations

import pickle
from typing import Any, Generic, TypeVar

from maze_train.errors import ConfigError

__all__ = ["Portable", "dumps"]

T = TypeVar("T", covariant=True)


class Portable(Generic[T]):
    """Something that may have to go to another process; lambdas and local classes are fine.

    Args:
        value: The value.
        key: Name of the setting that it comes from, for the message if it can not be sent.
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
                f"can not be sent to a worker process ({error}): create what can not be sent "
                "within the function, or use runner=dev",
            ) from error
        return _unpacked, (content, self.key)


def _unpacked(content: bytes, key: str) -> Portable[Any]:
    return Portable(pickle.loads(content), key)


def dumps(value: Any) -> bytes:
    """A value as bytes; objects of local classes need a slower way.

    Raises:
        Exception: Whatever pickle raises if it can not be sent.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        import cloudpickle

        content: bytes = cloudpickle.dumps(value)
        return content
