"""Entry point of `python -m maze_train`, which is equivalent to `maze-run`."""

import sys

from maze_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
