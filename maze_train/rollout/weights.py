"""Weights on their way from the learner to actors, through memory that both map."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.errors import TrainingError
from maze_train.workers.memory import ArrayLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from maze_train.types import Array, Tensor


HEADER_NBYTES = 64
CURRENT, STAMPS = 0, 1
"""Entries of the header: which of the two buffers is the newest, and a stamp for each of them.

A stamp is odd while the buffer is written.
"""

SEQ_NO = "<weights_seq_no>"
"""Key of the number of updates that the weights of a buffer have seen; no parameter has it."""


def weights_nbytes(model: nn.Module) -> int:
    """Bytes that `WeightsWriter` and `WeightsReader` need for a model."""
    return HEADER_NBYTES + 2 * _layout(model).nbytes


def acting_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, without those of submodules that only the learner needs.

    A model names these in `learner_only`.
    """
    left_out = getattr(model, "learner_only", ())
    state = model.state_dict(keep_vars=True)
    return {
        key: value
        for key, value in state.items()
        if key.split(".")[0] not in left_out and isinstance(value, torch.Tensor)
    }


def _layout(model: nn.Module) -> ArrayLayout[str]:
    """Layout of a buffer."""
    state = {key: value.detach().cpu().numpy() for key, value in acting_state(model).items()}
    arrays = {SEQ_NO: np.zeros(1, np.int64), **state}
    return ArrayLayout({key: (array.shape, array.dtype) for key, array in arrays.items()})


def _tensors(layout: ArrayLayout[str], memory: Any, offset: int = 0) -> dict[str, Tensor]:
    """The tensors of a buffer."""
    return {key: torch.from_numpy(x) for key, x in layout.arrays(memory, offset).items()}


class _SharedWeights:
    """Two buffers and a header over the same memory in several processes.

    The writer fills the buffer that is not the newest one and then says that it is. A reader that
    was so slow that its buffer is written again sees that by the stamp, and reads once more. Nobody
    ever waits for a lock, so that no process can leave one behind.
    """

    def __init__(self, nbytes: int, memory: Any) -> None:
        self.header: Array = np.ndarray(HEADER_NBYTES // 8, np.int64, buffer=memory)
        self.buffers = [
            torch.from_numpy(np.ndarray(nbytes, np.uint8, memory, HEADER_NBYTES + i * nbytes))
            for i in range(2)
        ]
        self._fence = threading.Lock()

    def fence(self) -> None:
        """Order memory accesses: those before the fence are done before those after it.

        Processors may reorder the accesses of a process, but none over the release of a lock and
        the acquisition that follows it.
        """
        for _ in range(2):
            with self._fence:
                pass


class WeightsWriter(_SharedWeights):
    """The learner's side: publishes the weights of its model.

    Args:
        model: The model.
        memory: Writable memory of `weights_nbytes(model)` bytes.
    """

    def __init__(self, model: nn.Module, memory: Any) -> None:
        self._model = model
        layout = _layout(model)
        super().__init__(layout.nbytes, memory)
        self._views = [_tensors(layout, buffer.numpy()) for buffer in self.buffers]

    @torch.no_grad()
    def publish(self, weights_seq_no: int) -> None:
        """Make the weights as they are now those that readers get."""
        # Asked for anew each time: a module may replace its buffers.
        state = {SEQ_NO: torch.tensor([weights_seq_no]), **acting_state(self._model)}
        for key, view in self._views[0].items():
            if state[key].shape != view.shape:
                raise TrainingError(
                    f"{key} of the model has the shape {list(state[key].shape)}, had "
                    f"{list(view.shape)} at the start: what is sent to actors keeps its shape"
                )

        def write(target: int) -> None:
            for key, view in self._views[target].items():
                view.copy_(state[key])

        self._write(write)

    def _write(self, write: Callable[[int], object]) -> None:
        """Let `write` fill the buffer that is not the newest one, and make it that."""
        header = self.header
        target = 1 - int(header[CURRENT])
        header[STAMPS + target] += 1
        self.fence()
        write(target)
        self.fence()
        header[STAMPS + target] += 1
        self.fence()
        header[CURRENT] = target

    def newest(self) -> list[Array]:
        """What readers need of the memory."""
        return [self.buffers[int(self.header[CURRENT])].numpy(), self.header]

    def state_dict(self) -> dict[str, Any]:
        """The weights that readers get now, which may be older than those of the model."""
        current = int(self.header[CURRENT])
        return {"published": self.buffers[current].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Publish the weights of `state`."""
        self._write(lambda target: self.buffers[target].copy_(state["published"]))


class WeightsReader(_SharedWeights):
    """The actor's side: gives its model the newest weights.

    The parameters of the model become views of one piece of memory, into which the weights are
    copied at once.

    Args:
        model: A model of the same layout, on the CPU.
        memory: The memory of the writer.
    """

    def __init__(self, model: nn.Module, memory: Any) -> None:
        self._model = model
        layout = _layout(model)
        super().__init__(layout.nbytes, memory)
        self._private = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._seen = (-1, -1)
        self.weights_seq_no = -1
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = _tensors(layout, self._private.numpy())
        self._loaded_seq_no = self._buffers.pop(SEQ_NO)
        for key in [key for key in self._buffers if key in parameters]:
            parameters[key].data = self._buffers.pop(key)

    def load(self) -> int:
        """Take the newest weights over; returns the updates that they have seen."""
        for seen in self._newest():
            if seen == self._seen:
                return self.weights_seq_no
            self._private.copy_(self.buffers[seen[0]])
            if self._is_whole(seen):
                self._seen = seen
                break
        self.weights_seq_no = int(self._loaded_seq_no)
        if self._buffers:
            # Not written in place: a module may derive something from its buffers.
            self._model.load_state_dict(self._buffers, strict=False)
        return self.weights_seq_no

    def _newest(self) -> Iterator[tuple[int, int]]:
        """The newest buffer and its stamp, again and again."""
        while True:
            current = int(self.header[CURRENT])
            self.fence()
            seen = (current, int(self.header[STAMPS + current]))
            self.fence()
            # Else the stamp may be that of weights that are written but not published yet.
            if int(self.header[CURRENT]) == current:
                yield seen

    def _is_whole(self, seen: tuple[int, int]) -> bool:
        """Whether the buffer was not written again meanwhile."""
        self.fence()
        current, stamp = seen
        return stamp % 2 == 0 and int(self.header[STAMPS + current]) == stamp
