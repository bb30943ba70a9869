"""LSTM and GRU layers with resets of the hidden state at the start of an episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import FunctionCtx, once_differentiable

from maze_train.core.types import Tensor, count_resets
from maze_train.nets.blocks import is_stock, is_traced
from maze_train.nets.config import RecurrentConfig

CLOSED = -1e4
"""Gate input whose sigmoid is exactly 0 in float32 and float64."""

ROUNDED_TO = 8
"""Sequence lengths are rounded up to a multiple of this value, because kernels are compiled for
each length."""


class RecurrentNetwork(nn.Module):
    """Stacked recurrent layers for single time steps and sequences.

    LSTM, with gates i, f, g, o from x_t and h_{t-1}:

    c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g),  h_t = sigmoid(o) * tanh(c_t)

    GRU, with gates r and z from x_t and h_{t-1}, n_x from x_t, and n_h from h_{t-1}:

    n = tanh(n_x + sigmoid(r) * n_h),  h_t = (1 - sigmoid(z)) * n + sigmoid(z) * h_{t-1}

    The state of an environment is one vector: h (and c for LSTM) of all layers in order.

    Args:
        input_size: F, size of the input.
        config: Type, size and number of layers.
        orthogonal: Whether weights are orthogonal with gain 1 and biases zero; otherwise PyTorch's
            initialisation.

    Attributes:
        layers: `torch.nn.LSTM` or `torch.nn.GRU` with the parameters.
        output_size: H, units per layer.
        state_size: S, size of the state of one environment.

    Source: Hochreiter and Schmidhuber (1997), Neural Computation 9(8), with the forget gate of Gers
    et al. (2000); Cho et al. (2014), arXiv:1406.1078, in the variant of `torch.nn.GRU`.
    """

    def __init__(self, input_size: int, config: RecurrentConfig, orthogonal: bool) -> None:
        super().__init__()
        self.is_lstm = config.cell == "lstm"
        layers = nn.LSTM if self.is_lstm else nn.GRU
        self.layers = layers(input_size, config.size, config.layers)
        if orthogonal:
            for param in self.layers.parameters():
                if param.dim() == 2:
                    nn.init.orthogonal_(param)
                else:
                    nn.init.zeros_(param)
        self.output_size = config.size
        self.state_size = config.size * config.layers * (2 if self.is_lstm else 1)

    def _weights(self) -> list[tuple[Tensor, ...]]:
        """Return the weights and biases for the input and the state of each layer."""
        flat = [weight for weight in self.layers._parameters.values() if weight is not None]
        return [tuple(flat[i : i + 4]) for i in range(0, len(flat), 4)]

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Process one time step of N environments.

        Args:
            x: Inputs, `[N, F]`.
            state: States before the step, `[N, S]`; zeros at the start of an episode.

        Returns:
            Features `[N, H]` and states after the step `[N, S]`.
        """
        parts = torch.split(state, self.output_size, dim=-1)
        if self._is_changed:
            return self._call(x, parts)
        new_parts = []
        for i, weights in enumerate(self._weights()):
            if self.is_lstm:
                x, cell = torch.lstm_cell(x, parts[2 * i : 2 * i + 2], *weights)
                new_parts += [x, cell]
            else:
                x = torch.gru_cell(x, parts[i], *weights)
                new_parts.append(x)
        return x, torch.cat(new_parts, dim=-1)

    @property
    def _is_changed(self) -> bool:
        """Whether the layers are modified (hooks, subclasses) and must therefore be called."""
        return not is_stock(self.layers, nn.LSTM if self.is_lstm else nn.GRU)

    def _call(self, x: Tensor, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Implement `step` by calling the layers."""
        if self.is_lstm:
            found, (h, c) = self.layers(
                x[None], (torch.stack(parts[::2]), torch.stack(parts[1::2]))
            )
            new_parts = [part for pair in zip(h, c, strict=True) for part in pair]
        else:
            found, h = self.layers(x[None], torch.stack(parts))
            new_parts = list(h)
        return found[0], torch.cat(new_parts, dim=-1)

    def sequence(
        self, x: Tensor, state: Tensor, resets: Tensor, max_resets: int | None = None
    ) -> Tensor:
        """Process L time steps of n environments, with resets of the states to zero.

        Args:
            x: Inputs, `[L, n, F]`.
            state: States before the first row, `[n, S]`.
            resets: Whether to reset the state before a row (the first row of an episode), bool,
                `[L, n]`.
            max_resets: Upper bound of the number of resets of an environment, not counting the
                first row. None: counted if needed, which synchronises the device.

        Returns:
            Features, `[L, n, H]`.
        """
        if is_traced(x) or self._is_changed:
            rows = []
            for row, keep in zip(x, resets.logical_not().unsqueeze(-1), strict=True):
                features, state = self.step(row, state * keep)
                rows.append(features)
            return torch.stack(rows)
        state = state * resets[0].logical_not().unsqueeze(-1)
        starts = [part.contiguous() for part in torch.split(state, self.output_size, -1)]
        if self.is_lstm or x.device.type != "cpu":
            return self._fused(x, starts, resets, max_resets)
        keep = resets.logical_not().to(x.dtype)
        for weights, start in zip(self._weights(), starts, strict=True):
            x = _GRULayer.apply(x, start, keep, *weights)  # type: ignore[no-untyped-call]  # untyped in torch
        return x

    def _fused(
        self, x: Tensor, starts: list[Tensor], resets: Tensor, max_resets: int | None
    ) -> Tensor:
        """Implement `sequence` with PyTorch's fused layers, which do not support resets."""
        if max_resets is None:
            max_resets = count_resets(resets)
        timeline = _Timeline(resets, max_resets, x.dtype) if max_resets else None
        if timeline is not None:
            x = timeline.spread(x)
        for i, weights in enumerate(self._weights()):
            if timeline is not None:
                x, weights = timeline.marked(x), self._with_eraser(weights)
            if self.is_lstm:
                h_and_c = [part.unsqueeze(0) for part in starts[2 * i : 2 * i + 2]]
                x = _run(torch.lstm, x, h_and_c, weights)
            else:
                x = _run(torch.gru, x, starts[i].unsqueeze(0), weights)
        return x if timeline is None else timeline.gather(x)

    def _with_eraser(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Extend the weights of a layer for inputs from `_Timeline.marked`.

        The first marker column adds the input bias in real rows. The second one closes the gates in
        reset rows. The other inputs of reset rows are zero, so h and c become exactly zero, and no
        gradient passes.
        """
        w_input, w_state, b_input, b_state = weights
        size = self.output_size
        eraser = torch.full_like(b_input, CLOSED)
        eraser[2 * size : 3 * size] = 0.0  # Gate g of an LSTM, or n of a GRU.
        columns = torch.stack([b_input, eraser], dim=1)
        wider = torch.cat([w_input, columns], dim=1)
        return wider, w_state, torch.zeros_like(b_input), b_state


def _run(
    function: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    start: Tensor | list[Tensor],
    weights: tuple[Tensor, ...],
) -> Tensor:
    """Run one layer of `torch.lstm` or `torch.gru` on `[L, n, F]`."""
    # Positional arguments: biases, one layer, no dropout, training, unidirectional, time-major.
    return function(x, start, weights, True, 1, 0.0, torch.is_grad_enabled(), False, False)[0]


class _Timeline:
    """Inserts rows that reset the recurrent state (reset rows) into sequences.

    Fused kernels do not support resets within a sequence. Each environment has a separate timeline,
    so the length increases by the maximum number of resets of an environment.

    Args:
        resets: Whether the recurrent state is reset before a row, `[L, n]`; the first row is
            ignored.
        max_resets: Upper bound of `count_resets`.
        dtype: Floating dtype of the marks.
    """

    def __init__(self, resets: Tensor, max_resets: int, dtype: torch.dtype) -> None:
        length, self.n = resets.shape
        shifts = resets.long().cumsum(0) - resets[0].long()
        self.length = -(-(length + max_resets) // ROUNDED_TO) * ROUNDED_TO
        rows = torch.arange(length, device=resets.device).unsqueeze(-1) + shifts
        columns = torch.arange(self.n, device=resets.device)
        self.places = (rows * self.n + columns).flatten()
        is_real = torch.zeros(self.length * self.n, dtype=dtype, device=resets.device)
        is_real.index_fill_(0, self.places, 1.0)
        self.marks = torch.stack([is_real, 1.0 - is_real], dim=-1).view(self.length, self.n, 2)

    def spread(self, x: Tensor) -> Tensor:
        """Convert `[L, n, F]` to `[length, n, F]`, with zeros in the inserted rows."""
        zeros = x.new_zeros(self.length * self.n, x.shape[-1])
        return zeros.index_copy(0, self.places, x.flatten(0, 1)).view(self.length, self.n, -1)

    def marked(self, x: Tensor) -> Tensor:
        """Append two columns: (1, 0) in real rows, (0, 1) in reset rows."""
        return torch.cat([x, self.marks], dim=-1)

    def gather(self, x: Tensor) -> Tensor:
        """Select the real rows: `[length, n, H]` to `[L, n, H]`."""
        return x.flatten(0, 1).index_select(0, self.places).view(-1, self.n, x.shape[-1])


class _GRULayer(torch.autograd.Function):
    """GRU layer on the CPU with analytic backpropagation through time.

    PyTorch has no fused CPU kernel for GRU layers. In the loop, small operations use NumPy, because
    NumPy calls have less overhead. Products over all time steps are computed at the end.
    Under autocast, the layer computes in float32.
    """

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        start: Tensor,
        keep: Tensor,
        w_input: Tensor,
        w_state: Tensor,
        b_input: Tensor,
        b_state: Tensor,
    ) -> Tensor:
        """Return features `[L, n, H]`; the state is reset before rows with `keep` 0, `[L, n]`."""
        (length, n), size = keep.shape, w_state.shape[1]
        # Gate inputs of r, z and n, overwritten by the gate values.
        gates = torch.addmm(b_input, x.flatten(0, 1), w_input.t()).view(length, n, -1)
        from_state = torch.empty_like(gates)
        before, after = x.new_empty(length, n, size), x.new_empty(length, n, size)
        w_state_t = w_state.t().contiguous()
        columns = (before, from_state, gates[..., : 2 * size])
        arrays = (
            before,
            after,
            keep.unsqueeze(-1),
            from_state[..., : 2 * size],
            from_state[..., 2 * size :],
            gates[..., : 2 * size],
            gates[..., :size],
            gates[..., size : 2 * size],
            gates[..., 2 * size :],
        )
        tensor_rows = zip(*(column.unbind(0) for column in columns), strict=True)
        array_rows = zip(*(array.numpy() for array in arrays), strict=True)
        h = start.detach().numpy()
        for (h_row, state_row, rz_row), row in zip(tensor_rows, array_rows, strict=True):
            h_before, h_after, keep_row, state_rz, state_n, rz, r, z, new = row
            np.multiply(h, keep_row, out=h_before)
            torch.addmm(b_state, h_row, w_state_t, out=state_row)
            rz += state_rz
            rz_row.sigmoid_()
            np.multiply(r, state_n, out=h_after)
            new += h_after
            np.tanh(new, out=new)
            np.subtract(h_before, new, out=h_after)
            h_after *= z
            h_after += new
            h = h_after
        ctx.save_for_backward(x, keep, w_input, w_state, gates, from_state, before)
        return after

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of x, start and the four parameters."""
        x, keep, w_input, w_state, gates, from_state, before = ctx.saved_tensors
        (length, n), size = keep.shape, w_state.shape[1]
        r, z, new = gates.split(size, dim=-1)
        aten = torch.ops.aten
        # Derivatives at the nonlinearities, initially without the factor dL/dh. In this order, both
        # n_x, r, z (from the input) and r, z, n_h (from the state) are contiguous.
        d_gates = gates.new_empty(length, n, 4, size)
        d_new = aten.tanh_backward(1 - z, new)
        d_gates[:, :, 0] = d_new
        d_gates[:, :, 1] = aten.sigmoid_backward(d_new * from_state[..., 2 * size :], r)
        d_gates[:, :, 2] = aten.sigmoid_backward(before - new, z)
        d_gates[:, :, 3] = d_new * r
        flat = d_gates.view(length, n, 4 * size)
        d_state = flat[..., size:]
        dh = torch.zeros_like(before[0])
        dh_array, dh_rows = dh.numpy(), dh.numpy()[:, None]
        arrays = (grad.contiguous(), d_gates, z, keep.unsqueeze(-1))
        rows = zip(d_state.unbind(0), *(array.numpy() for array in arrays), strict=True)
        for d_state_row, grad_row, d_gates_row, z_row, keep_row in reversed(list(rows)):
            dh_array += grad_row
            d_gates_row *= dh_rows
            dh_array *= z_row
            dh.addmm_(d_state_row, w_state)
            dh_array *= keep_row
        flat = flat.flatten(0, 1)
        d_input, d_state = flat[:, : 3 * size], flat[:, size:]
        sums = flat.sum(0)
        return (
            d_input.mm(w_input.roll(size, 0)).view_as(x),
            dh,
            None,
            d_input.t().mm(x.flatten(0, 1)).roll(-size, 0),
            d_state.t().mm(before.flatten(0, 1)),
            sums[: 3 * size].roll(-size, 0),
            sums[size:],
        )
