"""`python -m parlay.cli`: the command, also as one process of several."""

import sys

from parlay import process
from parlay.cli import main
from parlay.launch import rank

if __name__ == "__main__":
    code = main()
    if process.is_rank():
        rank.end(code)
    sys.exit(code)
