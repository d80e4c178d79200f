"""`python -m parlay.cli`: the command, also as one process of several."""

import sys

from parlay import process
from parlay.cli import main
from parlay.launch import worker

if __name__ == "__main__":
    code = main()
    if process.is_rank():
        worker.end(code)
    sys.exit(code)
