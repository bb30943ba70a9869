"""Throughput of EvoTorch's PGPE with symmetric sampling.

    python evotorch_pgpe.py --setting short --workers 2 --seconds 10 --way loop

Modes: `loop`: `GymNE`, sequential episodes; `batch`: `VecGymNE` over the same environments, one per
policy, with a batched forward pass for all policies; `native`: `VecGymNE` over gymnasium's
vectorised environment. With one worker everything runs in this process, otherwise in Ray actors
(including gradients, as EvoTorch recommends). Counts the episodes of finished updates; their
returns equal their lengths here.
"""

# The peer is installed in a separate virtual environment, so types are not checked.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Otherwise Ray writes a token file into the home directory.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import gymnasium
import ray
import torch
from common import (
    ENVS,
    LR,
    NOISE_STDDEV,
    POPULATION,
    Window,
    build_policy,
    initial_parameters,
    parse_arguments,
)
from evotorch.algorithms import PGPE
from evotorch.neuroevolution import GymNE, VecGymNE

logging.getLogger("evotorch").setLevel(logging.ERROR)


class NativeEnvs:
    """Factory of gymnasium's vector environment for an id.

    Args:
        env_id: Registered id with a vector entry point.
    """

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id

    def __call__(self, num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        """Create a vector environment with the given number of environments."""
        return gymnasium.make_vec(self.env_id, num_envs, "vector_entry_point")


def build_problem(way: str, env_id: str, workers: int) -> GymNE | VecGymNE:
    """Build the EvoTorch problem that evaluates policies."""
    actors = workers if workers > 1 else None
    if way == "native":
        return VecGymNE(NativeEnvs(env_id), build_policy, num_actors=actors)
    kind = {"loop": GymNE, "batch": VecGymNE}[way]
    config = {"disable_env_checker": True}
    return kind(env_id, build_policy, env_config=config, num_actors=actors)


def main() -> None:
    """Run one measurement."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.workers > 1:
            ray.init(num_cpus=arguments.workers, include_dashboard=False, _temp_dir=folder)
        problem = build_problem(arguments.way, ENVS[arguments.setting], arguments.workers)
        searcher = PGPE(
            problem,
            popsize=POPULATION,
            center_init=initial_parameters(),
            center_learning_rate=LR,
            stdev_learning_rate=0.0,
            stdev_init=NOISE_STDDEV,
            optimizer="adam",
            distributed=arguments.workers > 1,
        )
        window = Window(arguments.seconds)
        while not window.is_over:
            searcher.step()
            window.add(round(float(searcher.status["mean_eval"]) * POPULATION), POPULATION)
        ray.shutdown()
    window.print()


if __name__ == "__main__":
    main()
