"""Recurrent networks: sequences equal a loop over steps, with gradients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from cases import sweep
from torch import nn

from maze_train.core.types import count_resets
from maze_train.nets.config import RecurrentConfig
from maze_train.nets.recurrent import RecurrentNetwork

CELLS = ["lstm", "gru"]
L, N, F, H = 9, 3, 5, 4
RESETS = {
    "none": [],
    "first row": [(0, 0), (0, 1), (0, 2)],
    "one environment": [(4, 1)],
    "last row": [(L - 1, 2)],
    "many": [(0, 0), (2, 0), (3, 0), (7, 0), (1, 1), (8, 1)],
    "as long as the kernel": [(t, 0) for t in range(8)],  # L + 7 = 16, a multiple of ROUNDED_TO
    "every row": [(t, b) for t in range(L) for b in range(N)],
}


def make_memory(cell="lstm", layers=2, dtype=torch.float64, **sizes):
    """Return a recurrent network in evaluation mode with non-zero biases."""
    torch.manual_seed(1)
    config = RecurrentConfig(cell=cell, size=sizes.get("size", H), layers=layers)
    return RecurrentNetwork(sizes.get("inputs", F), config, orthogonal=False).to(dtype).eval()


def make_data(memory, pattern="many", length=L, n=N):
    """Return inputs, states, resets and a gradient with respect to the features."""
    generator = torch.Generator().manual_seed(2)
    dtype = next(memory.parameters()).dtype

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    resets = torch.zeros(length, n, dtype=torch.bool)
    for row, env in RESETS[pattern]:
        resets[row, env] = True
    x = draw(length, n, memory.layers.input_size)
    return x, draw(n, memory.state_size), resets, draw(length, n, memory.output_size)


def loop_of_steps(memory, x, state, resets):
    """Return the features of a loop over steps, the reference of `sequence`."""
    features = []
    for row, reset in zip(x, resets, strict=True):
        state = torch.where(reset[:, None], 0.0, state)
        row_features, state = memory.step(row, state)
        features.append(row_features)
    return torch.stack(features)


def run_with_gradients(function, memory, x, state, resets, d_features):
    """Return features and the gradients of inputs, states and parameters."""
    memory.zero_grad()
    x, state = x.clone().requires_grad_(), state.clone().requires_grad_()
    features = function(x, state, resets)
    features.backward(d_features)
    return [features.detach(), x.grad, state.grad, *(p.grad.clone() for p in memory.parameters())]


def sigmoid(x):
    """Return the logistic function."""
    return 1 / (1 + np.exp(-x))


def slow_step(cell, weights, x, state):
    """Return a step of one environment and layer from the equations; gates in PyTorch's order."""
    w_input, w_state, b_input, b_state = (w.detach().numpy() for w in weights)
    h = state[:H]
    a, b = w_input @ x + b_input, w_state @ h + b_state
    if cell == "lstm":
        i, f, g, o = np.split(a + b, 4)
        c = sigmoid(f) * state[H:] + sigmoid(i) * np.tanh(g)
        return np.concatenate([sigmoid(o) * np.tanh(c), c])
    (a_r, a_z, a_n), (b_r, b_z, b_n) = np.split(a, 3), np.split(b, 3)
    z = sigmoid(a_z + b_z)
    return (1 - z) * np.tanh(a_n + sigmoid(a_r + b_r) * b_n) + z * h


@pytest.mark.parametrize("cell", CELLS)
def test_recurrent_step_matches_the_papers(cell):
    """Features and new states match the papers; a state is h (and c) of each layer."""
    memory = make_memory(cell)
    x, state, _, _ = make_data(memory)
    features, new_state = memory.step(x[0], state)
    parts = 2 if cell == "lstm" else 1
    assert memory.state_size == 2 * parts * H == new_state.shape[1]
    params = list(memory.parameters())
    for env in range(N):
        inputs, expected = x[0, env].numpy(), []
        for layer in range(2):
            old = state[env, layer * parts * H : (layer + 1) * parts * H].numpy()
            expected.append(slow_step(cell, params[4 * layer : 4 * layer + 4], inputs, old))
            inputs = expected[-1][:H]
        np.testing.assert_allclose(new_state[env].detach(), np.concatenate(expected), rtol=1e-12)
        np.testing.assert_allclose(features[env].detach(), inputs, rtol=1e-12)


@pytest.mark.parametrize("pattern", list(RESETS))
@pytest.mark.parametrize("cell", CELLS)
@sweep("layers", [1, 2])
def test_recurrent_sequence_equals_a_loop_of_steps(cell, layers, pattern):
    """Features and gradients of inputs, states and parameters match in float64."""
    memory = make_memory(cell, layers)
    data = make_data(memory, pattern)
    expected = run_with_gradients(lambda *a: loop_of_steps(memory, *a), memory, *data)
    actual = run_with_gradients(memory.sequence, memory, *data)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pattern", list(RESETS))
@pytest.mark.parametrize("cell", CELLS)
def test_fused_recurrent_layers_equal_a_loop_of_steps(cell, pattern):
    """Fused layers, which other devices also use for GRUs, reset the state."""
    memory = make_memory(cell)

    def fused(bound, x, state, resets):
        state = torch.where(resets[0][:, None], 0.0, state)
        starts = [part.contiguous() for part in torch.split(state, H, -1)]
        return memory._fused(x, starts, resets, bound)

    data = make_data(memory, pattern)
    most = count_resets(data[2])
    assert most == max(sum(column[1:]) for column in data[2].T.tolist())
    expected = run_with_gradients(lambda *a: loop_of_steps(memory, *a), memory, *data)
    for bound in (None, most, most + 9):
        actual = run_with_gradients(partial(fused, bound), memory, *data)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pattern", ["none", "many"])
@pytest.mark.parametrize("cell", CELLS)
def test_float32_recurrence_matches_float64(cell, pattern):
    """Results in float32 match float64 for sizes used in training."""
    memory = make_memory(cell, size=32, inputs=16)
    data = make_data(memory, pattern, length=40, n=4)
    expected = run_with_gradients(lambda *a: loop_of_steps(memory, *a), memory, *data)
    x, state, resets, d_features = data
    memory.float()
    data = (x.float(), state.float(), resets, d_features.float())
    actual = run_with_gradients(memory.sequence, memory, *data)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cell", CELLS)
def test_resets_separate_values_and_gradients(cell, dtype):
    """Rows after a reset do not depend on earlier rows and send them no gradient."""
    memory = make_memory(cell, dtype=dtype)
    x, state, resets, d_features = make_data(memory, "none")
    resets[5, 1] = True
    d_features[:5] = 0.0
    _, d_x, d_state, *_ = run_with_gradients(memory.sequence, memory, x, state, resets, d_features)
    assert bool((d_x[:5, 1] == 0).all())
    assert bool((d_state[1] == 0).all())
    assert bool((d_x[:5, [0, 2]] != 0).any(-1).all())
    before = memory.sequence(x, state, resets)
    x[:5, 1] *= 1e3
    state[1] -= 1e3
    after = memory.sequence(x, state, resets)
    assert torch.equal(after[5:], before[5:])
    assert not torch.equal(after[:5, 1], before[:5, 1])


@pytest.mark.parametrize("cell", CELLS)
def test_sequence_without_graph(cell):
    """Features are the same without a graph, and the arguments are not modified."""
    memory = make_memory(cell, dtype=torch.float32)
    x, state, resets, _ = make_data(memory)
    kept = [y.clone() for y in (x, state, resets)]
    with torch.no_grad():
        features = memory.sequence(x, state, resets)
    torch.testing.assert_close(features, memory.sequence(x, state, resets).detach())
    assert all(torch.equal(a, b) for a, b in zip((x, state, resets), kept, strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_weights_are_exchanged_with_torch(cell):
    """A PyTorch layer with the same weights gives the same output from a zero state."""
    other = (nn.LSTM if cell == "lstm" else nn.GRU)(F, H, 2).double()
    memory = make_memory(cell)
    memory.layers.load_state_dict(other.state_dict())
    x, _, resets, _ = make_data(memory, "none")
    state = torch.zeros(N, memory.state_size, dtype=torch.float64)
    torch.testing.assert_close(memory.sequence(x, state, resets), other(x)[0])


@pytest.mark.parametrize("cell", CELLS)
def test_recurrent_weights_are_orthogonal_or_default(cell):
    """Weights are orthogonal with gain 1 and biases 0, or PyTorch's defaults."""
    config = RecurrentConfig(cell=cell, size=H, layers=2)
    for name, param in RecurrentNetwork(F, config, orthogonal=True).layers.named_parameters():
        if name.startswith("bias"):
            assert not param.any()
        else:
            torch.testing.assert_close(param.T @ param, torch.eye(param.shape[1]))
    torch.manual_seed(5)
    own = RecurrentNetwork(F, config, orthogonal=False)
    torch.manual_seed(5)
    other = (nn.LSTM if cell == "lstm" else nn.GRU)(F, H, 2)
    for a, b in zip(own.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
