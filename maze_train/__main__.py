"""`python -m maze_train` is `maze-run`."""

import sys

from maze_train.cli import main

sys.exit(main())
