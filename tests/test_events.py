"""Events and their statistics."""

from __future__ import annotations

import math
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from cases import sweep

from maze_train import Event, EventInterface, ShapeError, Statistics


class LossEvents(EventInterface, prefix="train"):
    loss = Event("Loss.")
    steps = Event("Steps.", reduce="sum")
    highest = Event("Largest.", reduce="max")
    lowest = Event("Smallest.", reduce="min")
    rate = Event("Learning rate.", reduce="last")


class MoreEvents(LossEvents, prefix="more"):
    entropy = Event("Entropy in nats.")


ALL = tuple(LossEvents.events())


def test_event_has_name_tag_and_reduction() -> None:
    """Name and tag come from the class that declares the event; inherited events come first."""
    assert LossEvents.loss.tag == "train/loss"
    assert LossEvents.loss.reduce == "mean"
    assert LossEvents.highest.doc == "Largest."
    assert MoreEvents.events() == [*LossEvents.events(), MoreEvents.entropy]
    names = ["loss", "steps", "highest", "lowest", "rate"]
    assert [event.name for event in LossEvents.events()] == names
    assert MoreEvents.entropy.tag == "more/entropy"
    assert MoreEvents.loss.tag == "train/loss"

    class SamePrefix(LossEvents):
        entropy = Event("Entropy in nats.")

    assert SamePrefix.entropy.tag == "train/entropy"


def test_event_is_frozen_and_checks_its_reduction() -> None:
    """An invalid reduction and later changes raise an error."""
    with pytest.raises(ValueError, match="median"):
        Event("x", reduce="median")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        LossEvents.loss.reduce = "sum"  # type: ignore[misc]
    assert LossEvents.loss.reduce == "mean"


def test_event_interface_requires_a_prefix() -> None:
    """A missing prefix and a shared event raise TypeError when the class is created."""
    with pytest.raises(TypeError, match="a prefix is required"):
        type("NoPrefix", (EventInterface,), {})
    with pytest.raises(TypeError, match="train/"):
        type("Sharing", (EventInterface,), {"again": LossEvents.loss}, prefix="x")
    assert LossEvents.loss.tag == "train/loss"


def test_statistics_mean_is_weighted() -> None:
    """Weights count samples; a value with weight 0 is ignored, even if it is NaN."""
    statistics = Statistics()
    statistics.record(LossEvents.loss, 1.0, weight=3)
    statistics.record(LossEvents.loss, 5.0, weight=1)
    statistics.record(LossEvents.loss, math.nan, weight=0)
    statistics.record(LossEvents.highest, 9.0, weight=0)
    assert statistics.reduce() == statistics.reduce() == {"train/loss": 2.0}
    statistics.record(LossEvents.loss, 4.0, weight=4)
    assert statistics.reduce() == {"train/loss": 3.0}
    statistics.clear()
    statistics.record_many(LossEvents.loss, [])
    assert statistics.reduce() == {}


class OtherEvents(EventInterface, prefix="train"):
    loss = Event("Loss.", reduce="sum")


@pytest.mark.parametrize(
    ("event", "value", "weight", "error", "message"),
    [
        (LossEvents.loss, 1.0, -1, ValueError, "train/loss"),
        (LossEvents.loss, torch.zeros(3), 1, ShapeError, r"train/loss.*\[3\]"),
        (OtherEvents.loss, 1.0, 1, ValueError, "train/loss"),
    ],
)
def test_invalid_recorded_values_raise(
    event: Event, value: Any, weight: float, error: type[Exception], message: str
) -> None:
    """Negative weights, tensors with several elements, and one tag with two reductions."""
    statistics = Statistics()
    statistics.record(LossEvents.loss, 1.0)
    statistics.record(event, value, weight)
    with pytest.raises(error, match=message):
        statistics.reduce()


@sweep("event", [event for event in ALL if event.reduce != "last"])
@sweep("place", [0, 1, 2])
def test_nan_is_kept_by_every_reduction(event: Event, place: int) -> None:
    """One NaN makes every reduction over the epoch NaN."""
    values = [1.0, 2.0, 3.0]
    values[place] = math.nan
    statistics = Statistics()
    statistics.record_many(event, values)
    assert math.isnan(statistics.reduce()[event.tag])


def test_recording_a_loss_releases_its_graph() -> None:
    """Recording a loss releases its graph."""
    weight = torch.nn.Parameter(torch.tensor(2.0))
    loss = weight * 3.0
    statistics = Statistics()
    statistics.record(LossEvents.loss, loss)
    parameter = weakref.ref(weight)
    del weight, loss
    assert parameter() is None
    assert statistics.reduce() == {"train/loss": 6.0}


@sweep("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_statistics_accept_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    """Tensors of any dtype and Python numbers are recorded in order."""
    statistics = Statistics()
    statistics.record(LossEvents.rate, torch.tensor([[1]], dtype=dtype))
    statistics.record(LossEvents.steps, torch.tensor(1, dtype=dtype))
    statistics.record(LossEvents.steps, 2)
    statistics.record(LossEvents.steps, np.float32(0.5))
    assert statistics.reduce() == {"train/rate": 1.0, "train/steps": 3.5}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_values_keep_their_order() -> None:
    """Values of one event on the GPU and on the host keep their order."""
    statistics = Statistics()
    statistics.record(LossEvents.rate, torch.tensor(1.0, device="cuda"))
    statistics.record(LossEvents.rate, torch.tensor(2.0))
    statistics.record(LossEvents.steps, torch.tensor(4, device="cuda"))
    statistics.record(LossEvents.rate, torch.tensor(3.0, device="cuda"))
    assert statistics.reduce() == {"train/rate": 3.0, "train/steps": 4.0}


@sweep("kind", [list, np.array, torch.tensor])
def test_record_many_takes_lists_arrays_and_tensors(kind: Any) -> None:
    """Every element counts once; a tensor may be overwritten after it was recorded."""
    statistics, values = Statistics(), kind([4.0, 2.0, 3.0])
    for event in ALL:
        statistics.record_many(event, values)
    values[0] = 99.0
    assert list(statistics.reduce().values()) == [3.0, 9.0, 4.0, 2.0, 3.0]


@pytest.mark.parametrize("sizes", [(5, 1), (1, 7, 0, 3), (0, 2)])
def test_merged_statistics_equal_all_values(sizes: tuple[int, ...]) -> None:
    """Merged statistics of shards of any size, including empty ones, equal those of all values."""
    rng = np.random.default_rng(3)
    shards = [(rng.normal(size=n), rng.integers(1, 9, size=n)) for n in sizes]
    merged = Statistics()
    for values, weights in shards:
        part = Statistics()
        for value, weight in zip(values, weights, strict=True):
            for event in ALL:
                part.record(event, float(value), float(weight))
        before = part.reduce() if len(values) == 1 else {}  # reads its values before the merge
        merged.merge(part)
        assert part.reduce() == before or len(values) != 1
    values = np.concatenate([v for v, _ in shards])
    weights = np.concatenate([w for _, w in shards])
    mean, total = np.average(values, weights=weights), values.sum()
    expected = [mean, total, values.max(), values.min(), values[-1]]
    assert list(merged.reduce().values()) == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_statistics_survive_pickling() -> None:
    """A pickled copy contains Python numbers and merges under the same tags."""
    statistics = Statistics()
    statistics.record(LossEvents.loss, torch.tensor(1.0), weight=3)
    copy = pickle.loads(pickle.dumps(statistics))
    copy.record(LossEvents.loss, 5.0)
    statistics.merge(copy)
    assert copy.reduce() == {"train/loss": 2.0}
    assert statistics.reduce() == {"train/loss": pytest.approx(11 / 7)}


def test_statistics_state_continues_an_epoch() -> None:
    """Statistics restored in the middle of an epoch give identical results."""
    whole, first, second = Statistics(), Statistics(), Statistics()
    for event in ALL:
        first.record_many(event, [1.0, 4.0])
    second.load_state_dict(first.state_dict())
    for event in ALL:
        second.record_many(event, [2.0])
        whole.record_many(event, [1.0, 4.0, 2.0])
    assert second.reduce() == whole.reduce()
