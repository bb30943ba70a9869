"""Training throughput of behavioral cloning with the library imitation.

    python imitation_bc.py --folder FOLDER --case cartpole --size 32 --batch-size 32

The progress bar is off; the logger has no output and is only called for the first batch of a call.
Some work cannot be disabled: each update also computes the critic's values, the mean probability of
the recorded actions, and the L2 norm of all weights. The critic's hidden layers are as large as
those of the policy, as in the library's FeedForward32Policy; with `--way slim` it has none.
"""

# The peer is installed in a separate virtual environment, so types are not checked.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import ARRAYS, CASES, ENTROPY_COEF, LR, load_weights, measure, parse_arguments
from imitation.algorithms.bc import BC
from imitation.data.types import Transitions
from imitation.util.logger import configure
from stable_baselines3.common.policies import ActorCriticPolicy

NEVER = 10**9


def main() -> None:
    """Run one measurement."""
    arguments = parse_arguments()
    case = CASES[arguments.case]
    hidden: Any = [arguments.size, arguments.size]
    policy = ActorCriticPolicy(
        case.observation_space,
        case.action_space,
        lambda _: LR,
        net_arch={"pi": hidden, "vf": [] if arguments.way == "slim" else hidden},
    )
    layers = (*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters())
    load_weights(arguments.folder, arguments.size, layers)
    with np.load(arguments.folder / ARRAYS, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    # Empty infos, as returned by flatten_trajectories for trajectories without infos.
    infos = np.array([{}] * len(arrays["acts"]))
    trainer = BC(
        observation_space=case.observation_space,
        action_space=case.action_space,
        rng=np.random.default_rng(0),
        policy=policy,
        demonstrations=Transitions(infos=infos, **arrays),
        batch_size=arguments.batch_size,
        optimizer_kwargs={"lr": LR},
        ent_weight=ENTROPY_COEF,
        l2_weight=0.0,
        device="cpu",
        custom_logger=configure(arguments.folder / "imitation", format_strs=[]),
    )
    obs, acts = (torch.tensor(arrays[name]) for name in ("obs", "acts"))

    def train(updates: int) -> None:
        trainer.train(n_batches=updates, log_interval=NEVER, progress_bar=False)

    @torch.no_grad()
    def loss() -> float:
        return float(trainer.loss_calculator(policy, obs, acts).loss)

    measure(train, loss, arguments.batch_size, arguments.seconds)


if __name__ == "__main__":
    main()
