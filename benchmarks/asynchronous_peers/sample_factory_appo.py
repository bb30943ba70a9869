"""Training throughput of Sample Factory's APPO with V-trace.

    python sample_factory_appo.py --env cartpole --actors 2 --seconds 20

Counts the transitions of finished updates, timed in the learner process.
"""

# The peer is installed in a separate virtual environment, so types are not checked.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from typing import Any

from common import UNROLL, WORKLOADS, Window, make_env, parse_arguments
from sample_factory.algo.learning.learner import Learner
from sample_factory.algo.learning.learner_worker import LearnerWorker
from sample_factory.algo.runners.runner_parallel import ParallelRunner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env

NETWORKS = {
    "cartpole": (
        *("--encoder_mlp_layers", "64", "64", "--nonlinearity=tanh"),
        "--actor_critic_share_weights=False",
        "--reward_scale=0.1",  # else the peer warns of high losses in most updates
    ),
    "pong": (
        *("--encoder_conv_architecture=convnet_atari", "--encoder_conv_mlp_layers", "512"),
        *("--nonlinearity=relu", "--obs_scale=255"),
    ),
}

PPO_OPTIONS = (
    *("--with_vtrace=False", "--rollout=128", "--recurrence=1", "--num_epochs=4"),
    *("--batch_size=2048", "--num_batches_per_epoch=4"),
)
"""Options of its PPO, with 64 environments over all actors."""


class VTraceLearner(Learner):
    """Works around a bug in 2.1.1: summaries require advantages, which V-trace does not store."""

    def _record_summaries(self, train_loop_vars: Any) -> Any:
        if self.cfg.with_vtrace:
            train_loop_vars.mb.advantages = train_loop_vars.adv
        return super()._record_summaries(train_loop_vars)


class TimedLearnerWorker(LearnerWorker):
    """Reports start time, end time and number of transitions of each update."""

    def __init__(
        self, loop: Any, cfg: Any, env_info: Any, buffers: Any, batcher: Any, policy_id: int
    ) -> None:
        super().__init__(loop, cfg, env_info, buffers, batcher, policy_id)
        self.learner = VTraceLearner(
            cfg, env_info, buffers.policy_versions, policy_id, self.param_server
        )

    def on_new_training_batch(self, batch_idx: int) -> None:
        """Update the weights."""
        learned, began = self.learner.env_steps, time.perf_counter()
        super().on_new_training_batch(batch_idx)
        steps = self.learner.env_steps - learned
        self.report_msg.emit({"update": (began, time.perf_counter(), steps)})


class TimedRunner(ParallelRunner):
    """Stops at the end of the window."""

    def __init__(self, cfg: Any, window: Window) -> None:
        super().__init__(cfg)
        self.window = window
        self.msg_handlers["update"] = [lambda _, message: window.add(*message["update"])]

    def _make_learner(self, event_loop: Any, policy_id: int, batcher: Any) -> TimedLearnerWorker:
        return TimedLearnerWorker(
            event_loop, self.cfg, self.env_info, self.buffer_mgr, batcher, policy_id
        )

    def _should_end_training(self) -> bool:
        return self.window.is_over


def make(env_id: str, *_: Any, **__: Any) -> Any:
    """Create an environment; Sample Factory passes additional settings."""
    return make_env(env_id)


def main() -> None:
    """Run one measurement."""
    arguments = parse_arguments()
    workload = WORKLOADS[arguments.env]
    register_env(arguments.env, partial(make, workload.env))
    window = Window(arguments.seconds)
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"--env={arguments.env}",
            f"--train_dir={folder}",
            "--device=cpu",
            "--async_rl=True",
            "--with_vtrace=True",
            "--normalize_returns=False",  # not possible with V-trace
            "--normalize_input=False",
            "--use_rnn=False",
            f"--rollout={UNROLL}",
            f"--recurrence={UNROLL}",  # length of the sequences for V-trace
            f"--num_workers={arguments.actors}",
            f"--num_envs_per_worker={workload.envs_per_actor}",
            f"--batch_size={workload.batch_size}",
            "--num_batches_per_epoch=1",
            "--num_epochs=1",
            "--summaries_use_frameskip=False",  # count decisions of the agent
            "--save_every_sec=100000",
            "--save_best_every_sec=100000",
            "--seed=0",
            *NETWORKS[arguments.env],
        ]
        if arguments.algorithm == "ppo":
            options += [*PPO_OPTIONS, f"--num_envs_per_worker={64 // arguments.actors}"]
        parser, _ = parse_sf_args(options)
        runner = TimedRunner(parse_full_cfg(parser, options), window)
        if runner.init() == ExperimentStatus.SUCCESS:
            runner.run()
    if not window.is_over:
        sys.exit("training ended before the measurement did")
    window.print()


if __name__ == "__main__":
    main()
