"""Training creates no float64 tensors on a device without float64."""

from __future__ import annotations

import pytest
import run_cases
from no_float64 import SimulatedMps

MPS = {"algorithm.device": "mps", "checkpoint.interval": 0, **run_cases.TWO_EPOCHS}
RUNS = {
    "ppo": {"algorithm.lr": "linear_0.01", "algorithm.entropy_coef": "linear_0.01"},
    "ppo, normalised": {"model.distributions.Box": "beta"},  # adaptive learning rate
    "td3, several boxes": {},
    "dqn, all options": {},
    "bc": {},
}


@pytest.mark.parametrize("case", RUNS)
def test_mps_has_no_float64(case, tmp_path):
    """The simulated device raises an error like PyTorch."""
    with SimulatedMps():
        run_cases.start(case, tmp_path / "run", **MPS, **RUNS[case])
