"""Events: declarations of statistics with name, meaning and reduction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch

from maze_train.core.errors import ShapeError
from maze_train.core.types import Array, Tensor

Reduction: TypeAlias = Literal["mean", "sum", "max", "min", "last"]

# Maximum number of pending values, which limits the memory of long epochs.
_PENDING_LIMIT = 65_536


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """One statistic, declared as a class attribute of an `EventInterface`.

    Args:
        doc: Meaning of the statistic, with its unit.
        reduce: Reduction of the values recorded within an epoch: weighted `mean`, `sum`, `max`,
            `min`, or the `last` value.
    """

    doc: str
    reduce: Reduction = "mean"
    name: str = field(default="", init=False)
    """Name of the attribute."""
    tag: str = field(default="", init=False)
    """`<prefix>/<name>`: column in metrics.csv, and metric name in all other writers."""

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum", "max", "min", "last"):
            raise ValueError(
                f"reduce={self.reduce!r}: expected 'mean', 'sum', 'max', 'min' or 'last'"
            )

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    def of_part(self, part: str) -> Event:
        """Return the event for a part, such as an action component: `<tag>/<part>`.

        Statistics are keyed by tag, so a new event may be created in each call.
        """
        return Event.of_tag(f"{self.tag}/{part}", self.doc, self.reduce)

    @classmethod
    def of_tag(cls, tag: str, doc: str, reduce: Reduction = "mean") -> Event:
        """Create an event without an interface, such as a user-defined metric."""
        return cls(doc, reduce)._called(tag.partition("/")[2], tag)

    def of_owner(self, owner: str) -> Event:
        """Return the event for an owner, such as a policy: `<prefix>/<owner>/<name>`.

        Statistics are keyed by tag, so a new event may be created in each call.
        """
        prefix = self.tag.removesuffix(f"/{self.name}")
        event = Event(self.doc, self.reduce)
        return event._called(self.name, f"{prefix}/{owner}/{self.name}")

    def _called(self, name: str, tag: str) -> Event:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "tag", tag)
        return self


class EventInterface:
    """Base class of groups of events with a common prefix. It is never instantiated.

        class ActorCriticEvents(EventInterface, prefix="train"):
            policy_loss = Event("Clipped surrogate loss.")

    In this example, the event `ActorCriticEvents.policy_loss` has the tag `train/policy_loss`.
    Subclasses inherit events with their tags, and the prefix by default.
    """

    prefix: ClassVar[str] = ""

    def __init_subclass__(cls, *, prefix: str | None = None, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if prefix is not None:
            cls.prefix = prefix
        if not cls.prefix:
            raise TypeError(
                f'class {cls.__name__}(EventInterface, prefix="..."): a prefix is required'
            )
        for member in vars(cls).values():
            if isinstance(member, Event):
                if member.tag:
                    owner = f"{cls.__name__}.{member.name}"
                    raise TypeError(f"{owner} already has the tag {member.tag}")
                member._called(member.name, f"{cls.prefix}/{member.name}")

    @classmethod
    def events(cls) -> list[Event]:
        """Return all events of the group in order of declaration, inherited events first."""
        found: dict[str, Event] = {}
        for base in reversed(cls.__mro__):
            found.update({n: e for n, e in vars(base).items() if isinstance(e, Event)})
        return list(found.values())


class _Total:
    """Running total of one event. Totals can be merged exactly."""

    __slots__ = ("reduce", "value", "weight")

    def __init__(self, reduce: Reduction, value: float = 0.0, weight: float = 0.0) -> None:
        self.reduce = reduce
        self.value = value
        self.weight = weight

    def add(self, value: float, weight: float) -> None:
        """Add a value, multiplied by its weight for the reduction `mean`."""
        if self.weight == 0.0 or self.reduce == "last":
            self.value = value
        elif self.reduce in ("mean", "sum"):
            self.value += value
        # NaN takes precedence. Comparisons with NaN are false, so the result would otherwise depend
        # on the order.
        elif math.isnan(value) or (
            value > self.value if self.reduce == "max" else value < self.value
        ):
            self.value = value
        self.weight += weight

    def result(self) -> float:
        return self.value / self.weight if self.reduce == "mean" else self.value


class Statistics:
    """Collects values of events and reduces each event to one value.

    `record` only appends: tensors remain on their device. `reduce`, `merge` and `state_dict` copy
    all tensors of a device and dtype to the host at once. NaN propagates: the mean, sum, maximum or
    minimum of values that include NaN is NaN.

    Attributes:
        kept: Tensors passed to `keep`, by name and owner. They are not metrics: `reduce`, `merge`
            and `state_dict` ignore them.
    """

    __slots__ = ("_pending", "_totals", "kept")

    def __init__(self) -> None:
        self._pending: list[tuple[Event, float | Tensor, float]] = []
        self._totals: dict[str, _Total] = {}
        self.kept: dict[str, dict[str, Tensor]] = {}

    def keep(self, name: str, value: Tensor, owner: str = "default") -> None:
        """Hand a tensor of a loss to the learner; replaces an earlier tensor of this name.

        Args:
            name: Name of the tensor, such as `td_errors`.
            value: Mean over the samples, 0-d, or one value per sample, `[n]`; detached.
            owner: ID of the module.
        """
        self.kept.setdefault(name, {})[owner] = value.detach()

    def record(self, event: Event, value: float | Tensor, weight: float = 1.0) -> None:
        """Add one value of an event.

        Args:
            event: Event of the value.
            value: A number or a one-element tensor on any device; detached. Tensors are read later:
                pass a clone if the tensor will be overwritten.
            weight: Weight of the value in a mean, such as the number of samples, >= 0. All
                reductions ignore values with weight 0.
        """
        if type(value) is not float and getattr(value, "requires_grad", False):
            value = value.detach()  # type: ignore[union-attr]  # only a tensor has requires_grad
        self._pending.append((event, value, weight))
        if len(self._pending) >= _PENDING_LIMIT:
            self._settle()

    def record_many(self, event: Event, values: Sequence[float] | Array | Tensor) -> None:
        """Add several values of an event, such as episode returns, each with weight 1."""
        if isinstance(values, torch.Tensor):
            for element in values.detach().flatten().clone().unbind():
                self.record(event, element)
        else:
            for number in np.asarray(values, dtype=np.float64).ravel().tolist():
                self.record(event, number)

    def merge(self, other: Statistics) -> None:
        """Append all values of `other`.

        The result is exact: means are merged from their sums and weights.
        """
        if other._totals:
            self._settle()
            for tag, total in other._totals.items():
                self._total(tag, total.reduce).add(total.value, total.weight)
        self._pending += other._pending
        if len(self._pending) >= _PENDING_LIMIT:
            self._settle()

    def reduce(self) -> dict[str, float]:
        """Return the reduced value of each event by tag, in the order of first appearance.

        Events without values are omitted. Values remain until `clear`.

        Raises:
            ShapeError: If a recorded tensor has more than one element.
            ValueError: If a weight is negative, or a tag was recorded with two reductions.
        """
        self._settle()
        return {tag: total.result() for tag, total in self._totals.items()}

    def clear(self) -> None:
        """Discard all values."""
        self._pending.clear()
        self._totals.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the totals by tag as plain values."""
        self._settle()
        return {
            tag: {"reduce": total.reduce, "value": total.value, "weight": total.weight}
            for tag, total in self._totals.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the totals from `state_dict`; values recorded so far are discarded."""
        self._pending = []
        self._totals = {tag: _Total(**total) for tag, total in state.items()}
        self.kept = {}

    # Pickled as plain values, because tensors would be shared between processes by file descriptor.
    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)

    def _total(self, tag: str, reduce: Reduction) -> _Total:
        total = self._totals.get(tag)
        if total is None:
            total = self._totals[tag] = _Total(reduce)
        elif total.reduce != reduce:
            raise ValueError(f"{tag} was recorded with reduce={total.reduce!r} and {reduce!r}")
        return total

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        numbers = _to_numbers(pending)
        for (event, _, weight), number in zip(pending, numbers, strict=True):
            if weight < 0:
                raise ValueError(f"{event.tag}: weight {weight!r}: expected a number >= 0")
            if weight == 0:
                continue
            value = number * weight if event.reduce == "mean" else number
            self._total(event.tag, event.reduce).add(value, float(weight))


def _to_numbers(pending: list[tuple[Event, float | Tensor, float]]) -> list[float]:
    """Convert the values to floats, with one transfer per accelerator and dtype."""
    numbers = [math.nan] * len(pending)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (event, value, _) in enumerate(pending):
        if not isinstance(value, torch.Tensor):
            numbers[i] = float(value)
        elif value.numel() != 1:
            raise ShapeError(
                f"{event.tag}: a recorded tensor has shape {list(value.shape)}, expected 1 element"
            )
        elif value.device.type == "cpu":
            numbers[i] = float(value.item())
        else:
            groups.setdefault((value.device, value.dtype), []).append(i)
    for places in groups.values():
        tensors = [pending[i][1] for i in places]
        joined = torch.stack([t.reshape(()) for t in tensors if isinstance(t, torch.Tensor)])
        for i, number in zip(places, joined.cpu().double().tolist(), strict=True):
            numbers[i] = number
    return numbers
