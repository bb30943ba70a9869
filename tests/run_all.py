"""Runs all tests, in two processes.

Those that train need one core and no clock: they run beside the others, of which the fast ones come
first. `make test` calls this script; with arguments it is plain pytest.

The output of the others is shown as it comes, that of training at the end. The last line is a
summary of pytest: that of the others, or of training if something failed there alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    """Run the tests; returns the exit code of pytest."""
    if arguments:
        os.execv(sys.executable, [*PYTEST, *arguments])
    with tempfile.TemporaryFile("w+") as output:
        training = subprocess.Popen(
            [*PYTEST, "-m", "learning", "-p", "no:cacheprovider"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code, summary = shown([*PYTEST, "-m", "not learning"])
            code_of_training = training.wait()
        finally:
            training.kill()
            training.wait()
        output.seek(0)
        told = output.read()
    print(f"\nTests that train:\n{told.strip()}", flush=True)
    if code or not code_of_training:
        print(summary, flush=True)
    return code or code_of_training


def shown(command: list[str]) -> tuple[int, str]:
    """Show what a command prints; returns its exit code and its last line."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for piece in iter(lambda: os.read(process.stdout.fileno(), 65536), b""):
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
            last = (last + piece.decode(errors="replace"))[-2000:]
    lines = [line for line in last.splitlines() if line.strip()]
    return process.returncode, lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
