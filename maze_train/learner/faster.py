"""Faster ways to the losses and gradients of a learner than autograd: by hand, or compiled.

A reader can skip this file: numbers are those of `Learner.loss_of`, but for the rounding of other
sums, and modules keep their names and state. What is compiled is kept by PyTorch in the directory
of `TORCHINDUCTOR_CACHE_DIR`, for further runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import _dynamo as dynamo
from torch import nn
from torch._dynamo.utils import calculate_time_spent

from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, Statistics
from maze_train.core.notices import warn
from maze_train.core.types import Tensor
from maze_train.learner.steps import LearnerEvents

AnyLearner: TypeAlias = Any
"""A `Learner`."""
Record: TypeAlias = "tuple[Event, float | Tensor, tuple[float, ...]]"

BACKEND = "inductor"
MOST_GRAPHS = 64
"""Graphs of one function, over all learners of a process: PyTorch's own limit is 8."""


class FasterLosses(ABC):
    """Computes the losses of some modules in the place of `Learner.loss_of`.

    Args:
        learner: The learner.
    """

    modules: Collection[str] = ()
    """Ids of the modules that this update computes by this object."""

    def __init__(self, learner: AnyLearner) -> None:
        self.learner = learner

    @abstractmethod
    def begin(self) -> None:
        """Choose the modules of an update, before all else in it."""

    @abstractmethod
    def loss_of(self, module_id: str, batch: Any, statistics: Statistics) -> Tensor:
        """The loss of a module, 0-d; without a graph, if `add_gradients` knows its gradient."""

    def add_gradients(self) -> None:  # noqa: B027 (not all have some)
        """Add gradients of losses without a graph to those that autograd found."""

    def report(self, statistics: Statistics) -> None:  # noqa: B027 (not all take time)
        """Record what took time, at the end of an update."""


class LossesByHand(FasterLosses):
    """Computes losses without a graph, and their gradients, where it can: see `supports`."""

    _backward: tuple[Callable[[], object], ...] = ()

    @abstractmethod
    def supports(self, module_id: str) -> bool:
        """Whether losses and gradients of a module that may learn are those of its learner."""

    @abstractmethod
    def loss_and_backward(
        self, module_id: str, batch: Any, statistics: Statistics
    ) -> tuple[Tensor, Callable[[], object]]:
        """The loss of a module, 0-d without a graph, and what adds its gradients to `.grad`."""

    def begin(self) -> None:
        """Look which modules are supported: networks and methods may have changed."""
        self._backward = ()
        learner, modules = self.learner, self.learner.modules
        is_other = learner.loss_function or modules.with_loss or torch.is_anomaly_enabled()
        if is_other or learner.settings.autocast != "none":
            self.modules = ()
        else:
            self.modules = {key for key in modules.keys() - modules.frozen if self.supports(key)}

    def loss_of(self, module_id: str, batch: Any, statistics: Statistics) -> Tensor:
        """The loss of a module, 0-d."""
        loss, backward = self.loss_and_backward(module_id, batch, statistics)
        self._backward = (*self._backward, backward)
        return loss

    def add_gradients(self) -> None:
        """Add the gradients of the losses since the last call."""
        backward, self._backward = self._backward, ()
        for add in backward:
            add()


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
        except (dynamo.exc.Unsupported, dynamo.exc.UserError) as error:
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
    return calculate_time_spent()["total_wall_time"]


def faster_losses(learner: AnyLearner) -> FasterLosses | None:
    """The faster losses of a learner: compiled, if its settings say so, or by hand."""
    compiled = None if learner.settings.compile == "none" else _compiled_losses(learner)
    if compiled is None and learner.by_hand_class is not None:
        return learner.by_hand_class(learner)  # type: ignore[no-any-return]  # of any learner
    return compiled


def _compiled_losses(learner: AnyLearner) -> FasterLosses | None:
    """Return the compiled losses of a learner, as its settings say; None: nothing is compiled.

    Without a C++ compiler there is a warning.

    Raises:
        ConfigError: If a module has recurrent layers.
    """
    from torch._inductor import cpp_builder, exc

    way = learner.settings.compile
    parts = [part for module in learner.modules.values() for part in module.modules()]
    if any(isinstance(part, nn.RNNBase) for part in parts):
        problem = "the compiler of PyTorch takes no recurrent layers (model.rnn); expected none"
        raise ConfigError("algorithm.compile", problem, way)
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        warn(
            f"algorithm.compile={way}: no C++ compiler was found, so nothing "
            "is compiled; install g++, or name one in the environment variable CXX"
        )
        return None
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MOST_GRAPHS)
    kinds = {"forward": CompiledNetworks, "update": CompiledLosses}
    return kinds[way](learner)
