"""`python -m parlay.cli`: the command, also as one process of several."""

import sys

from parlay.cli import main
from parlay.launch import places, worker

if __name__ == "__main__":
    code = main()
    if places.is_worker():
        worker.end(code)
    sys.exit(code)
