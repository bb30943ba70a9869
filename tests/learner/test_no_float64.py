"""Training creates no float64 tensors on a device without float64."""

from __future__ import annotations

import numpy as np
import pytest
import run_cases
import torch
from cases import everyday
from no_float64 import SimulatedMps

MPS = {"algorithm.device": "mps", "checkpoint.interval": 0, **run_cases.TWO_EPOCHS}
RUNS = {
    "ppo": {
        "algorithm.lr": "linear_0.01",
        "algorithm.entropy_coef": "linear_0.01",
        "algorithm.optimizer": {"_target_": "torch.optim.Adam", "fused": True},
    },
    "ppo, normalised": {"model.distributions.Box": "beta"},  # adaptive learning rate
    "td3, several boxes": {},
    "dqn, all options": {},
    "bc": {},
}


@pytest.mark.parametrize("case", everyday(2, RUNS))
def test_mps_has_no_float64(case, tmp_path):
    """Runs complete on the simulated device, which rejects float64 like PyTorch."""
    with SimulatedMps():
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(1, dtype=torch.float64).to("mps")
        result = run_cases.start(case, tmp_path / "run", **MPS, **RUNS[case])
    assert len(result.history) == 2
    losses = [value for name, value in result.history[-1].items() if name.endswith("loss")]
    assert losses
    assert np.isfinite(losses).all()
