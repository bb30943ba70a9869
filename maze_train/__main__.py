"""`python -m maze_train` is `maze-run`."""

import sys

from maze_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
