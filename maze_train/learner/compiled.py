"""Losses that PyTorch compiles.

A reader can skip this file. What is compiled is kept by PyTorch in the directory of
`TORCHINDUCTOR_CACHE_DIR`, for further runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, Statistics
from maze_train.core.notices import warn
from maze_train.core.torch_private import compiler_parts
from maze_train.core.types import Tensor
from maze_train.learner.faster import AnyLearner, FasterLosses
from maze_train.learner.steps import LearnerEvents

Record: TypeAlias = "tuple[Event, float | Tensor, tuple[float, ...]]"

PARTS = compiler_parts()
BACKEND = "inductor"
MOST_GRAPHS = 64
"""Graphs of one function, over all learners of a process: PyTorch's own limit is 8."""


class Compiled(FasterLosses):
    """Computes the losses of all modules of a learner with what is compiled."""

    def __init__(self, learner: AnyLearner) -> None:
        super().__init__(learner)
        self._spent_s = _spent_s()

    def begin(self) -> None:
        """Take all modules."""
        self.modules = self.learner.modules.keys()

    def report(self, statistics: Statistics) -> None:
        """Record the time that compilation took since the last call, if any."""
        before, self._spent_s = self._spent_s, _spent_s()
        if self._spent_s > before:
            statistics.record(LearnerEvents.compile_s, self._spent_s - before)


class CompiledNetworks(Compiled):
    """Compiles modules, each that a loss calls with all that it calls in turn.

    To act, they are called as they are: there are other sizes and no gradient.
    """

    def __init__(self, learner: AnyLearner) -> None:
        super().__init__(learner)
        self._calls: WeakKeyDictionary[nn.Module, list[tuple[nn.Module, Any]]]
        self._calls = WeakKeyDictionary()

    def loss_of(self, module_id: str, batch: Any, statistics: Statistics) -> Tensor:
        """The loss of a module, 0-d, with a graph."""
        with self._networks_compiled(self.learner.modules[module_id]):
            loss: Tensor = self.learner.loss_of(module_id, batch, statistics)
        return loss

    @contextmanager
    def _networks_compiled(self, module: nn.Module) -> Iterator[None]:
        calls = self._calls.get(module)
        if calls is None:
            calls = self._calls[module] = [
                (part, torch.compile(part._call_impl, backend=BACKEND))
                for part in module.modules()
                if part._compiled_call_impl is None
            ]
        for part, call in calls:
            part.__dict__["_compiled_call_impl"] = call
        try:
            yield
        finally:
            for part, _ in calls:
                del part.__dict__["_compiled_call_impl"]


class CompiledLosses(Compiled):
    """Compiles each loss as one graph, with another one for its gradient.

    There are two such pairs where the number of samples changes: for the first number, and for all
    others.

    Random numbers of a loss are drawn before it: `before_compiled_loss(module_id, batch)` of a
    learner does that, if there is one.
    """

    def __init__(self, learner: AnyLearner) -> None:
        super().__init__(learner)
        self._draws = getattr(learner, "before_compiled_loss", None)
        self._compiled: Any = torch.compile(self._recorded, fullgraph=True, backend=BACKEND)

    def loss_of(self, module_id: str, batch: Any, statistics: Statistics) -> Tensor:
        """The loss of a module, 0-d, with a graph."""
        if self._draws is not None:
            self._draws(module_id, batch)
        try:
            loss, records = self._compiled(module_id, batch)
        except PARTS.unsupported as error:
            raise ConfigError(
                "algorithm.compile",
                f"the loss of {type(self.learner).__name__} cannot be compiled as a whole "
                f"({str(error).splitlines()[0]}); expected forward or none",
                "update",
            ) from error
        for event, value, weight in records:
            statistics.record(event, value, *weight)
        return loss  # type: ignore[no-any-return]  # of what is compiled

    def _recorded(self, module_id: str, batch: Any) -> tuple[Tensor, list[Record]]:
        """The loss and the statistics that it records: graphs hold no statistics."""
        recorder = _Recorder()
        return self.learner.loss_of(module_id, batch, recorder), recorder.records


class _Recorder:
    """Keeps the values that a loss records in its `Statistics`."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, event: Event, value: float | Tensor, *weight: float) -> None:
        self.records.append((event, value, weight))


def _spent_s() -> float:
    """Seconds of compilation in this process."""
    return PARTS.time_spent().get("total_wall_time", 0.0)


def compiled_losses(learner: AnyLearner) -> FasterLosses | None:
    """The compiled losses of a learner, as its settings say; None: nothing is compiled.

    Without a C++ compiler there is a warning.

    Raises:
        ConfigError: If a module has recurrent layers.
    """
    way = learner.settings.compile
    parts = [part for module in learner.modules.values() for part in module.modules()]
    if any(isinstance(part, nn.RNNBase) for part in parts):
        problem = "the compiler of PyTorch takes no recurrent layers (model.rnn); expected none"
        raise ConfigError("algorithm.compile", problem, way)
    try:
        PARTS.find_compiler()
    except PARTS.no_compiler:
        warn(
            f"algorithm.compile={way}: no C++ compiler was found, so nothing "
            "is compiled; install g++, or name one in the environment variable CXX"
        )
        return None
    PARTS.raise_limit(MOST_GRAPHS)
    kinds = {"forward": CompiledNetworks, "update": CompiledLosses}
    return kinds[way](learner)
