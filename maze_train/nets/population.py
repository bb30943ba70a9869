"""Copies of a policy with different weights, evaluated in one batch.

Results of a copy are bit-for-bit independent of its row and of the other copies:

- Matrix products are computed with NumPy, one copy after the other. In contrast to PyTorch's
  batched products, the result of such a product does not depend on the number of rows or on memory
  alignment.
- The number of rows of all other arrays is a multiple of `ROW_BLOCK`, so that SIMD instructions
  process all elements. The scalar code for the remaining elements of other arrays would round
  differently.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import nn

from maze_train.core.torch_private import is_hooked
from maze_train.core.types import Array, Tensor, TensorTree, rows_of, tree_map
from maze_train.nets.acting import Acted, ActingModel, acted_with, acting
from maze_train.nets.blocks import MLP, activation
from maze_train.nets.joint import JointModel
from maze_train.nets.normalization import find_normalizer
from maze_train.nets.policy_model import Policy, PolicyModel
from maze_train.nets.template import DictEncoder, TemplateNet, is_plain
from maze_train.spaces.agents import AGENTS
from maze_train.spaces.tensors import joined, part_of

View: TypeAlias = Callable[[torch.Tensor], Array]


Net: TypeAlias = "Callable[[Any, int], Array]"
"""Maps observations and the number of required rows to outputs `[rows, size]`."""

ROW_BLOCK = 32
"""Number of elements per iteration of vectorised code: two registers of 16 float32 values each."""


def row_blocks(count: int) -> int:
    """Round `count` up to a multiple of `ROW_BLOCK`."""
    return -(-count // ROW_BLOCK) * ROW_BLOCK


class Population(ABC):
    """Copies of a policy that differ only in the trainable parameters.

    Frozen parameters and observation statistics are shared with the model.

    Args:
        model: The policy, on the CPU; see `nets.acting`.
        rows: Number of rows, >= the number of copies.

    Attributes:
        rows: Number of rows in memory.
        dim: Number of trainable parameters.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.model: Any = model
        self.rows = rows
        trained = [p for p in model.parameters() if p.requires_grad]
        self.dim = sum(p.numel() for p in trained)
        self._dtype = trained[0].detach().numpy().dtype if trained else np.dtype(np.float32)
        # A stride of whole cache lines gives every copy the same memory alignment.
        self._stride = -(-self.dim // ROW_BLOCK) * ROW_BLOCK * self._dtype.itemsize
        self._memory = torch.zeros(self.rows * self._stride, dtype=torch.uint8).numpy()
        self._weights: Array = self._view_at(0, (self.dim,))
        self._offsets: dict[int, int] = {}
        offset = 0
        for p in trained:
            self._offsets[id(p)] = offset
            offset += p.numel() * self._dtype.itemsize

    def weights_of(self, row: int) -> Array:
        """Return the trainable parameters of a copy in the order of `model.parameters()`, `[dim]`.

        The result is a writable view. Request a new view after `act`, which may move weights.
        """
        weights: Array = self._weights[row]
        return weights

    @abstractmethod
    def act(
        self, rows: Sequence[int], obs: TensorTree, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Choose the actions of some copies; see `ActingModel`.

        Args:
            rows: Indices of the copies, increasing.
            obs: Observations of all copies, including inactive ones.
            noise: Noise in the order of `rows`, `[row_blocks(len(rows)), noise_size]`, or None.
            deterministic: Whether to take the most likely actions instead of sampling.

        Returns:
            Actions in the order of `rows`, `[row_blocks(len(rows)), ...]`; the remaining rows are
            undefined.
        """

    def forget(self, row: int) -> None:  # noqa: B027 (not all policies are recurrent)
        """Reset the recurrent state of a copy."""

    def _view(self, param: torch.Tensor) -> Array:
        """Return a parameter of all copies, `[rows, *shape]`."""
        offset = self._offsets.get(id(param))
        if offset is None:
            shared = param.detach().numpy()
            return np.broadcast_to(shared, (self.rows, *shared.shape))
        return self._view_at(offset, tuple(param.shape))

    def _view_at(self, offset: int, shape: tuple[int, ...]) -> Array:
        strides = [math.prod(shape[i + 1 :]) * self._dtype.itemsize for i in range(len(shape))]
        view: Array = np.ndarray(
            (self.rows, *shape), self._dtype, self._memory, offset, (self._stride, *strides)
        )
        return view


BatchedParams: TypeAlias = Callable[[int, TensorTree], Tensor]
"""Computes the distribution parameters of the first `count` copies from `count` and observations
with `row_blocks(count)` rows."""


def batched_params(model: PolicyModel, view: View) -> BatchedParams:
    """Build the batched evaluation of a feedforward template policy without images.

    Args:
        model: The policy.
        view: Returns a parameter of all copies.
    """
    trunk = None if model.trunk is None else _batched(model.trunk, view)
    net = _batched(model.policy.net, view)
    free = None if model.policy.free_params is None else view(model.policy.free_params)

    def compute(count: int, obs: TensorTree) -> Tensor:
        inputs = model.inputs(obs)
        # Some OpenBLAS kernels read uninitialised memory into unused lanes, which causes NumPy
        # warnings (as in https://github.com/numpy/numpy/issues/24067).
        with np.errstate(invalid="ignore"):
            outputs = net(inputs if trunk is None else trunk(inputs, count), count)
        if free is not None:
            outputs = np.concatenate([outputs, free[: len(outputs)]], axis=1)
        params = torch.from_numpy(outputs)
        return params if model.masking is None else model.masking.apply(params, obs)

    return compute


def is_batchable(model: nn.Module) -> bool:
    """Return whether `batched_params` supports a model; subclassed modules are not supported."""
    return (
        type(model) is PolicyModel
        and model.rnn is None
        and type(model.policy) is Policy
        and not is_hooked(model.policy)
        and is_plain(model.policy.net)
        and (model.trunk is None or is_plain(model.trunk))
    )


class BatchedPopulation(Population):
    """Copies of a batchable policy (`is_batchable`), or of a `JointModel` of batchable policies.

    The weights of active copies are contiguous in memory, followed by inactive copies.

    Args:
        model: The policy, or a `JointModel`.
        count: Number of copies.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__(model, row_blocks(count))
        self._count = count
        self._row_at, self._place_of = np.arange(self.rows), np.arange(self.rows)
        self._active: list[int] = []
        policies: Any = policies_of(model)
        self._policies = {key: batched_params(own, self._view) for key, own in policies.items()}

    def weights_of(self, row: int) -> Array:
        """Return the trainable parameters of a copy; see `Population.weights_of`."""
        return super().weights_of(self._place_of[row])

    def act(
        self, rows: Sequence[int], obs: TensorTree, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Choose the actions of some copies, for all agents; see `Population.act`."""
        if rows != self._active:
            self._activate(rows)
        if (observed := self._observed) is not None:
            obs = tree_map(lambda x: _taken(x, observed), obs)
        params = self._params(len(rows), obs)
        if self._order is not None:
            params = _taken(params, self._order)
        if isinstance(self.model, JointModel):
            return self.model.acted_with(params, noise, deterministic)
        return acted_with(self.model.distribution, params, self._state, noise, deterministic)

    def _activate(self, rows: Sequence[int]) -> None:
        """Move active copies to the front, and store the mapping between rows and memory order.

        Once all copies are active, their memory order is the order of the rows.
        """
        self._active, active, count = list(rows), np.asarray(rows), len(rows)
        if count == self._count:
            new, old = np.arange(self.rows), self._place_of.copy()
        else:
            is_active = np.zeros(self.rows, bool)
            is_active[active] = True
            is_active = is_active[self._row_at]
            free = np.flatnonzero(~is_active[:count])
            behind = count + np.flatnonzero(is_active[count:])
            new, old = np.concatenate([free, behind]), np.concatenate([behind, free])
        self._weights[new] = self._weights[old]
        self._row_at[new] = self._row_at[old]
        self._place_of[self._row_at] = np.arange(self.rows)
        lying, order = self._row_at[:count], self._place_of[active]
        filled = np.arange(row_blocks(count)) % count  # repeats copies until the last block is full
        self._state = torch.zeros(len(filled), 0)
        is_in_order = np.array_equal(lying, active)
        self._order = None if is_in_order else order[filled]
        is_whole = count == self._count == len(filled)
        self._observed = None if is_whole else lying[filled]

    def _params(self, count: int, obs: TensorTree) -> Tensor:
        """Return the distribution parameters of the first copies in memory order."""
        model = self.model
        if not isinstance(model, JointModel):
            return self._policies[""](count, obs)
        assert isinstance(obs, dict)
        parts = part_of(obs, AGENTS)
        found = [
            self._policies[policy](count, part_of(parts, agent))
            for agent, policy in model.agents.items()
        ]
        return torch.cat(found, dim=-1)


def _taken(x: Tensor, rows: Array) -> Tensor:
    """Select rows; NumPy has less overhead than `index_select`."""
    return torch.from_numpy(x.numpy().take(rows, 0))


def policies_of(model: nn.Module) -> Mapping[str, nn.Module]:
    """Return the policies of a `JointModel` by id; any other model is returned with the id ""."""
    return model.by_policy if isinstance(model, JointModel) else {"": model}


class RowPopulation(Population):
    """Copies of any policy, evaluated one after the other.

    Args:
        model: The policy, which may be recurrent.
        count: Number of copies.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__(model, count)
        normalizer = find_normalizer(model)
        self._acting = acting(model)
        self._state = torch.zeros(count, 1, self._acting.state_size)
        # Other parameters and buffers are shared with the model, so changes apply to all copies.
        kept = [p for p in model.parameters() if id(p) not in self._offsets]
        shared: dict[int, Any] = {id(x): x for x in (*kept, *model.buffers(), normalizer)}
        self._copies: list[ActingModel] = []
        for row in range(count):
            own = copy.deepcopy(model, dict(shared))
            for param, mine in zip(model.parameters(), own.parameters(), strict=True):
                if id(param) in self._offsets:
                    mine.data = torch.from_numpy(self._view(param))[row]
            self._copies.append(acting(own))

    def act(
        self, rows: Sequence[int], obs: TensorTree, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Choose the actions of some copies, see `Population.act`."""
        results: list[Acted] = []
        for k, i in enumerate(rows):
            # A clone has the same alignment for every row.
            row = tree_map(torch.clone, rows_of(obs, slice(i, i + 1)))
            drawn = None if noise is None else noise[k : k + 1].clone()
            acted = self._copies[i].act(row, self._state[i].clone(), drawn, deterministic)
            self._state[i] = acted.hidden_state
            results.append(acted)
        fillers = [results[0]] * (row_blocks(len(rows)) - len(rows))
        columns = zip(*results, *fillers, strict=True)
        return Acted._make(joined(column) for column in columns)

    def forget(self, row: int) -> None:
        """Reset the recurrent state of a copy."""
        self._acting.on_episode_end(self._state[row])
        self._state[row] = 0.0


def _batched(module: nn.Module, view: View) -> Net:
    """Build the batched version of a plain module (see `is_plain`)."""
    if isinstance(module, TemplateNet):
        encoder, layers = _batched(module.encoder, view), _batched(module.layers, view)
        return lambda obs, count: layers(encoder(obs, count), count)
    if isinstance(module, DictEncoder):
        return _batched_dict(module, view)
    if isinstance(module, MLP):
        return _batched_mlp(module, view)
    # All copies share modules without parameters.
    return lambda obs, count: cast("Array", module(obs).numpy())


def _batched_dict(module: DictEncoder, view: View) -> Net:
    parts = [
        (key, _batched(encoder, view), _batched(branch, view))
        for key, encoder, branch in zip(module.keys, module.encoders, module.branches, strict=True)
    ]

    def forward(obs: TensorTree, count: int) -> Array:
        assert isinstance(obs, dict)
        outputs = [branch(encoder(obs[key], count), count) for key, encoder, branch in parts]
        return np.concatenate(outputs, axis=1)

    return forward


def _batched_mlp(mlp: MLP, view: View) -> Net:
    """Build the batched version of an MLP."""
    layers: list[Any] = list(mlp.layers)
    weights = [(view(layer.weight), view(layer.bias)) for layer in layers]
    apply = activation(mlp.nonlinearity)

    def forward(x: Array, count: int) -> Array:
        n = len(x)
        # For a single product, NumPy calls a different kernel, which rounds differently.
        k = max(count, 2)
        for i, (weight, bias) in enumerate(weights):
            products = np.zeros((n, weight.shape[1]), weight.dtype)
            np.matmul(weight[:k], x[:k, :, None], out=products[:k, :, None])
            x = products
            x += bias[:n]
            if i < mlp.n_hidden:
                x = apply(torch.from_numpy(x)).numpy()
        return x

    return forward


def build_population(model: nn.Module, count: int) -> Population:
    """Create copies of a policy, evaluated in one batch if the policy supports batching."""
    is_batched = all(map(is_batchable, policies_of(model).values()))
    return (BatchedPopulation if is_batched else RowPopulation)(model, count)
