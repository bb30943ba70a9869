"""Names of the files and folders of runs, studies and sweeps; signals that processes handle."""

import signal

NAMED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(signal.Signals(getattr(signal, name)) for name in NAMED if hasattr(signal, name))
"""Signals sent to all processes of a job by Ctrl-C, a closing terminal or a cluster scheduler (on
Windows, the first two). Workers ignore these signals; the main process handles them and may save
before it exits."""
OF_SCHEDULER = SIGNALS[3:]
"""Signals that cluster schedulers send before they stop or preempt a job."""

CONFIG, METRICS, SUMMARY, DIGESTS = "config.yaml", "metrics.csv", "summary.json", "files.json"
ENVIRONMENT, LOG, SERVICES = "environment.json", "run.log", "services.json"
BEST, CHECKPOINTS, POLICIES = "best", "checkpoints", "policies"
PLOTS, PROFILE, ROLLOUTS, BEFORE = "plots", "profile", "rollouts", "before"
FINAL = "final"
"""Version of the policy in the latest checkpoint; this version has no separate folder."""

OUTPUTS, LATEST = "outputs", "latest"
"""Default parent directory of runs, and name of the link to the most recently started run. The file
`latest` in a directory of checkpoints contains the name of the checkpoint to resume."""

CURVE = "learning_curve.png"

WEIGHTS, SPACES, SCORE = "policy.pt", "spaces.json", "score.json"
POLICY_FILES = (WEIGHTS, SPACES, CONFIG, SCORE)
"""Files of a saved policy."""

JOBS, POLICIES_TABLE = "jobs.csv", "policies.csv"
JOURNAL, STUDY_FILE = "study.journal", "study.yaml"

OF_RUN = (BEST, CHECKPOINTS, METRICS, WEIGHTS, SUMMARY)
OF_SEVERAL = (JOURNAL, STUDY_FILE, "multirun.yaml", JOBS)
"""File names that identify directories of runs (besides `CONFIG`), and of studies or sweeps."""

RESULTS = (METRICS, BEST, SUMMARY, POLICIES, PLOTS, PROFILE, ROLLOUTS, "events.out.tfevents.*")
"""File patterns of the results of a run, without configuration and checkpoints."""

VALIDATION_LOSS = "validation/loss"
"""Metric of the loss on the validation part of a dataset."""

PROGRAM = "maze-run"
"""Name of the command."""
