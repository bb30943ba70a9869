"""Losses compiled by `torch.compile`.

PyTorch caches compiled code in `TORCHINDUCTOR_CACHE_DIR` across runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, Statistics
from maze_train.core.notices import warn
from maze_train.core.torch_private import CompiledCall, compiler_parts
from maze_train.core.types import Tensor
from maze_train.learner.events import LearnerEvents
from maze_train.learner.steps import Part

Batch = TypeVar("Batch")
Record: TypeAlias = "tuple[Event, float | Tensor, tuple[float, ...]]"
Kept: TypeAlias = list[tuple[str, Tensor]]

PARTS = compiler_parts()
BACKEND = "inductor"
MAX_GRAPHS = 64
"""Maximum number of graphs per function and process. PyTorch's default of 8 is too low if a process
creates several learners."""


class Compiled(ABC, Generic[Batch]):
    """Base class of compiled losses; the compiler generates the backward pass.

    Args:
        loss_of: `Learner.loss_of`.
    """

    def __init__(self, loss_of: Callable[..., Tensor]) -> None:
        self._loss_of = loss_of
        self._spent_s = _spent_s()

    @abstractmethod
    def loss_of(
        self, part: Part[Batch], module_id: str, batch: Batch, statistics: Statistics
    ) -> Tensor:
        """Return the loss of a module in one part of a gradient step, 0-d, with its graph."""

    def report(self, statistics: Statistics) -> None:
        """Record the compilation time since the last call."""
        before, self._spent_s = self._spent_s, _spent_s()
        if self._spent_s > before:
            statistics.record(LearnerEvents.compile_s, self._spent_s - before)


class CompiledNetworks(Compiled[Batch]):
    """Compiles the forward pass of each module that a loss calls, including submodules.

    Acting is not compiled, because acting uses different batch sizes and no gradients.

    Args:
        loss_of: `Learner.loss_of`.
        modules: Modules of the learner by ID.
    """

    def __init__(self, loss_of: Callable[..., Tensor], modules: Mapping[str, nn.Module]) -> None:
        super().__init__(loss_of)
        self._modules = modules
        self._calls: WeakKeyDictionary[nn.Module, list[CompiledCall]] = WeakKeyDictionary()

    def loss_of(
        self, part: Part[Batch], module_id: str, batch: Batch, statistics: Statistics
    ) -> Tensor:
        """Return the loss of a module, 0-d, with its autograd graph."""
        module = self._modules[module_id]
        if module not in self._calls:
            layers = [layer for layer in module.modules() if not CompiledCall.is_used_by(layer)]
            self._calls[module] = [CompiledCall(layer, BACKEND) for layer in layers]
        with ExitStack() as stack:
            for call in self._calls[module]:
                stack.enter_context(call)
            return self._loss_of(module_id, batch, statistics, part.loss)


class CompiledLosses(Compiled[Batch]):
    """Compiles each loss, including its backward pass, as a single graph.

    If the number of samples changes, the loss is recompiled once with dynamic shapes.

    Args:
        loss_of: `Learner.loss_of`.
        name: Name of the learner, for error messages.
    """

    def __init__(self, loss_of: Callable[..., Tensor], name: str) -> None:
        super().__init__(loss_of)
        self._name = name
        self._compiled: dict[str, Callable[[str, Batch], tuple[Tensor, list[Record], Kept]]] = {}

    def loss_of(
        self, part: Part[Batch], module_id: str, batch: Batch, statistics: Statistics
    ) -> Tensor:
        """Return the loss of a module, 0-d, with its autograd graph."""
        if part.name not in self._compiled:
            self._compiled[part.name] = self._compile(part)
        try:
            loss, records, kept = self._compiled[part.name](module_id, batch)
        except PARTS.unsupported as error:
            raise ConfigError(
                "algorithm.compile",
                f"the loss of {self._name} cannot be compiled as a whole "
                f"({str(error).splitlines()[0]}); use forward or none",
                "update",
            ) from error
        for event, value, weight in records:
            statistics.record(event, value, *weight)
        for name, tensor in kept:
            statistics.keep(name, tensor)
        return loss

    def _compile(
        self, part: Part[Batch]
    ) -> Callable[[str, Batch], tuple[Tensor, list[Record], Kept]]:
        def recorded(module_id: str, batch: Batch) -> tuple[Tensor, list[Record], Kept]:
            recorder = Recorder()
            loss = self._loss_of(module_id, batch, recorder, part.loss)
            return loss, recorder.records, recorder.tensors

        compiled: Callable[[str, Batch], tuple[Tensor, list[Record], Kept]]
        compiled = torch.compile(recorded, fullgraph=True, backend=BACKEND)
        return compiled


class Recorder(Statistics):
    """Statistics that collect values without reduction; compiled graphs cannot call others."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.tensors: Kept = []

    def record(self, event: Event, value: float | Tensor, weight: float | None = None) -> None:
        """Add one value."""
        self.records.append((event, value, () if weight is None else (weight,)))

    def keep(self, name: str, value: Tensor, owner: str = "") -> None:
        """Hand a tensor to the learner."""
        self.tensors.append((name, value))


def _spent_s() -> float:
    """Return the total compilation time of this process in seconds."""
    return PARTS.time_spent().get("total_wall_time", 0.0)


def compiled_losses(
    way: str, loss_of: Callable[..., Tensor], modules: Mapping[str, nn.Module], name: str
) -> Compiled[Any] | None:
    """Return compiled losses; warn and return None if there is no C++ compiler.

    Args:
        way: Value of `algorithm.compile`: `forward` or `update`.
        loss_of: `Learner.loss_of`.
        modules: Modules of the learner by ID.
        name: Name of the learner, for error messages.

    Raises:
        ConfigError: If a module has recurrent layers.
    """
    layers = [layer for module in modules.values() for layer in module.modules()]
    if any(isinstance(layer, nn.RNNBase) for layer in layers):
        problem = "torch.compile does not support recurrent layers (model.rnn); use none"
        raise ConfigError("algorithm.compile", problem, way)
    try:
        PARTS.find_compiler()
    except PARTS.no_compiler:
        warn(
            f"algorithm.compile={way}: no C++ compiler was found, so nothing "
            "is compiled; install g++, or name one in the environment variable CXX"
        )
        return None
    PARTS.raise_limit(MAX_GRAPHS)
    return CompiledNetworks(loss_of, modules) if way == "forward" else CompiledLosses(loss_of, name)
