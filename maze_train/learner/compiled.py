"""Losses compiled by `torch.compile`.

PyTorch caches compiled code in `TORCHINDUCTOR_CACHE_DIR` across runs.
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
MAX_GRAPHS = 64
"""Maximum number of graphs per function and process. PyTorch's default of 8 is too low if a process
creates several learners."""


class Compiled(Autograd[Batch]):
    """Base class of compiled losses."""

    def __init__(self, loss_of: LossOf[Batch]) -> None:
        super().__init__(loss_of)
        self._spent_s = _spent_s()

    def uses_autograd(self, module_id: str) -> bool:
        """Return False: the compiler generates the backward pass."""
        return False

    def report(self, statistics: Statistics) -> None:
        """Record the compilation time since the last call."""
        before, self._spent_s = self._spent_s, _spent_s()
        if self._spent_s > before:
            statistics.record(LearnerEvents.compile_s, self._spent_s - before)


class CompiledNetworks(Compiled[Batch]):
    """Compiles the forward pass of each module that a loss calls, including submodules.

    Acting is not compiled, because acting uses different batch sizes and no gradients.

    Args:
        loss_of: Computes the loss of a module.
        modules: Modules of the learner by ID.
    """

    def __init__(self, loss_of: LossOf[Batch], modules: Mapping[str, nn.Module]) -> None:
        super().__init__(loss_of)
        self._modules = modules
        self._calls: WeakKeyDictionary[nn.Module, list[CompiledCall]] = WeakKeyDictionary()

    def loss_of(self, module_id: str, batch: Batch, statistics: Statistics) -> Tensor:
        """Return the loss of a module, 0-d, with its autograd graph."""
        module = self._modules[module_id]
        if module not in self._calls:
            parts = [part for part in module.modules() if not CompiledCall.is_used_by(part)]
            self._calls[module] = [CompiledCall(part, BACKEND) for part in parts]
        with ExitStack() as stack:
            for call in self._calls[module]:
                stack.enter_context(call)
            return self._loss_of(module_id, batch, statistics)


class CompiledLosses(Compiled[Batch]):
    """Compiles each loss, including its backward pass, as a single graph.

    If the number of samples changes, the loss is recompiled once with dynamic shapes.

    Args:
        loss_of: Computes the loss of a module.
        name: Name of the learner, for error messages.
    """

    def __init__(self, loss_of: LossOf[Batch], name: str) -> None:
        super().__init__(loss_of)
        self._name = name
        self._compiled: Callable[[str, Batch], tuple[Tensor, list[Record]]] = torch.compile(
            self._recorded, fullgraph=True, backend=BACKEND
        )

    def loss_of(self, module_id: str, batch: Batch, statistics: Statistics) -> Tensor:
        """Return the loss of a module, 0-d, with its autograd graph."""
        try:
            loss, records = self._compiled(module_id, batch)
        except PARTS.unsupported as error:
            raise ConfigError(
                "algorithm.compile",
                f"the loss of {self._name} cannot be compiled as a whole "
                f"({str(error).splitlines()[0]}); use forward or none",
                "update",
            ) from error
        for event, value, weight in records:
            statistics.record(event, value, *weight)
        return loss

    def _recorded(self, module_id: str, batch: Batch) -> tuple[Tensor, list[Record]]:
        """Return the loss and the values to record; compiled graphs cannot call `Statistics`."""
        recorder = Recorder()
        return self._loss_of(module_id, batch, recorder), recorder.records


class Recorder(Statistics):
    """Statistics that collect recorded values without reduction."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, event: Event, value: float | Tensor, weight: float | None = None) -> None:
        """Add one value."""
        self.records.append((event, value, () if weight is None else (weight,)))


def _spent_s() -> float:
    """Return the total compilation time of this process in seconds."""
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
        problem = "torch.compile does not support recurrent layers (model.rnn); use none"
        raise ConfigError("algorithm.compile", problem, way)
    try:
        PARTS.find_compiler()
    except PARTS.no_compiler:
        warn(
            f"algorithm.compile={way}: no C++ compiler was found, so nothing "
            "is compiled; install g++, or name one in the environment variable CXX"
        )
        return False
    PARTS.raise_limit(MAX_GRAPHS)
    return True
