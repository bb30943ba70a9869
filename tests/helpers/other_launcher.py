"""A launcher as other packages have it: each job runs in another process, with a copied task."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REQUEUED = 75
TARGET = "hydra_plugins.other.OtherLauncher"


class OtherLauncher(Launcher):
    """Runs one job after the other in a forked process; one that SIGUSR2 ends is started again."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Remember everything."""
        self.sent = (hydra_context, task_function)
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        """The returned values, in order."""
        found = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            loader = self.sent[0].config_loader
            config = loader.load_sweep_config(self.config, list(overrides))
            config.hydra.job.id, config.hydra.job.num = str(number), number
            receiver, sender = multiprocessing.Pipe(duplex=False)
            sent = cloudpickle.dumps((*self.sent, config, Singleton.get_state()))
            while True:
                process = multiprocessing.get_context("fork").Process(
                    target=run_there, args=(sent, sender)
                )
                process.start()
                while not receiver.poll(0.1) and process.exitcode != REQUEUED:
                    pass
                if receiver.poll():
                    found.append(cloudpickle.loads(receiver.recv_bytes()))
                process.join()
                if process.exitcode != REQUEUED:
                    break
        return found


def run_there(sent: bytes, sender: Any) -> None:
    """Run a job in its process."""
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(REQUEUED))
    context, task, config, state = cloudpickle.loads(sent)
    Singleton.set_state(state)
    keys = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
    returned: JobReturn = run_job(hydra_context=context, task_function=task, config=config, **keys)
    sender.send_bytes(cloudpickle.dumps(returned))


@pytest.fixture
def other_launcher() -> Iterator[str]:
    """The launcher, installed under the names `other` and `local`; its target."""
    Plugins.instance().class_name_to_class[TARGET] = OtherLauncher
    for name in ("other", "local"):
        ConfigStore.instance().store(name, {"_target_": TARGET}, "hydra/launcher")
    yield TARGET
    launchers = ConfigStore.instance().repo["hydra"]["launcher"]
    for name in ("other", "local"):
        del launchers[f"{name}.yaml"]
    del Plugins.instance().class_name_to_class[TARGET]
