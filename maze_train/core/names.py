"""Names of the files and folders of runs, studies and sweeps, defined only here."""

CONFIG, METRICS, SUMMARY, DIGESTS = "config.yaml", "metrics.csv", "summary.json", "files.json"
ENVIRONMENT, LOG, SERVICES = "environment.json", "run.log", "services.json"
BEST, CHECKPOINTS, POLICIES = "best", "checkpoints", "policies"
PLOTS, PROFILE, ROLLOUTS, BEFORE = "plots", "profile", "rollouts", "before"
FINAL = "final"
"""Version of the policy in the latest checkpoint, which has no folder."""

OUTPUTS, LATEST = "outputs", "latest"
"""Default parent directory of runs, and the link in it to the run that started last. The file
`latest` in a directory of checkpoints names the checkpoint to resume from."""

CURVE = "learning_curve.png"

WEIGHTS, SPACES, SCORE = "policy.pt", "spaces.json", "score.json"
POLICY_FILES = (WEIGHTS, SPACES, CONFIG, SCORE)
"""Files of a saved policy."""

JOBS, POLICIES_TABLE = "jobs.csv", "policies.csv"
JOURNAL, STUDY_FILE = "study.journal", "study.yaml"

OF_RUN = (BEST, CHECKPOINTS, METRICS, WEIGHTS, SUMMARY)
OF_SEVERAL = (JOURNAL, STUDY_FILE, "multirun.yaml", JOBS)
"""File names that identify the directory of a run (besides `CONFIG`), and of a study or sweep."""

RESULTS = (METRICS, BEST, SUMMARY, POLICIES, PLOTS, PROFILE, "events.out.tfevents.*")
"""Glob patterns of the results of a run, without configuration and checkpoints."""
