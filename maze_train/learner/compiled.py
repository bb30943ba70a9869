"""Losses that PyTorch compiles.

PyTorch keeps compiled code in the directory of `TORCHINDUCTOR_CACHE_DIR`, for later runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, Statistics
from maze_train.core.notices import warn
from maze_train.core.torch_private import CompiledCall, compiler_parts
from maze_train.core.types import Tensor
from maze_train.learner.events import LearnerEvents
from maze_train.learner.loss_strategies import Autograd, LossOf

Batch = TypeVar("Batch")
Record: TypeAlias = "tuple[Event, float | Tensor, tuple[float, ...]]"

PARTS = compiler_parts()
BACKEND = "inductor"
MOST_GRAPHS = 64
"""Graphs of one function, over all learners of a process: PyTorch's own limit is 8."""


class Compiled(Autograd[Batch]):
    """Base of compiled losses of all modules."""

    def __init__(self, loss_of: LossOf[Batch]) -> None:
        super().__init__(loss_of)
        self._spent_s = _spent_s()

    def uses_autograd(self, module_id: str) -> bool:
        """Return False: the compiler derives the gradients."""
        return False

    def report(self, statistics: Statistics) -> None:
        """Record the time that compilation took since the last call, if any."""
        before, self._spent_s = self._spent_s, _spent_s()
        if self._spent_s > before:
            statistics.record(LearnerEvents.compile_s, self._spent_s - before)


class CompiledNetworks(Compiled[Batch]):
    """Compiles each module that a loss calls, with all modules that it calls in turn.

    Acting does not use the compiled modules: it has other batch sizes and no gradient.

    Args:
        loss_of: Computes the loss of a module.
        modules: The modules of the learner by id.
    """

    def __init__(self, loss_of: LossOf[Batch], modules: Mapping[str, nn.Module]) -> None:
        super().__init__(loss_of)
        self._modules = modules
        self._calls: WeakKeyDictionary[nn.Module, list[CompiledCall]] = WeakKeyDictionary()

    def loss_of(self, module_id: str, batch: Batch, statistics: Statistics) -> Tensor:
        """Return the loss of a module, 0-d, with a graph."""
        module = self._modules[module_id]
        if module not in self._calls:
            parts = [part for part in module.modules() if not CompiledCall.is_used_by(part)]
            self._calls[module] = [CompiledCall(part, BACKEND) for part in parts]
        with ExitStack() as stack:
            for call in self._calls[module]:
                stack.enter_context(call)
            return self._loss_of(module_id, batch, statistics)


class CompiledLosses(Compiled[Batch]):
    """Compiles each loss as one graph, with another one for its gradient.

    There are two such pairs if the number of samples changes: one for the first number, and one
    for all others.

    Args:
        loss_of: Computes the loss of a module.
        name: Name of the learner, for messages.
    """

    def __init__(self, loss_of: LossOf[Batch], name: str) -> None:
        super().__init__(loss_of)
        self._name = name
        self._compiled: Callable[[str, Batch], tuple[Tensor, list[Record]]] = torch.compile(
            self._recorded, fullgraph=True, backend=BACKEND
        )

    def loss_of(self, module_id: str, batch: Batch, statistics: Statistics) -> Tensor:
        """Return the loss of a module, 0-d, with a graph."""
        try:
            loss, records = self._compiled(module_id, batch)
        except PARTS.unsupported as error:
            raise ConfigError(
                "algorithm.compile",
                f"the loss of {self._name} cannot be compiled as a whole "
                f"({str(error).splitlines()[0]}); expected forward or none",
                "update",
            ) from error
        for event, value, weight in records:
            statistics.record(event, value, *weight)
        return loss

    def _recorded(self, module_id: str, batch: Batch) -> tuple[Tensor, list[Record]]:
        """Return the loss and the values that it records: graphs hold no statistics."""
        recorder = Recorder()
        return self._loss_of(module_id, batch, recorder), recorder.records


class Recorder(Statistics):
    """Statistics that keep what a loss records, as it is."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, event: Event, value: float | Tensor, weight: float | None = None) -> None:
        """Add one value."""
        self.records.append((event, value, () if weight is None else (weight,)))


def _spent_s() -> float:
    """Return the seconds of compilation in this process."""
    return PARTS.time_spent().get("total_wall_time", 0.0)


def check_compiler(way: str, modules: Iterable[nn.Module]) -> bool:
    """Return whether losses can be compiled; warn if there is no C++ compiler.

    Args:
        way: Value of `algorithm.compile`.
        modules: The modules of the learner.

    Raises:
        ConfigError: If a module has recurrent layers.
    """
    parts = [part for module in modules for part in module.modules()]
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
        return False
    PARTS.raise_limit(MOST_GRAPHS)
    return True
