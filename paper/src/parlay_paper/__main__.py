"""`python -m parlay_paper`: Parlay's command line, which also knows the methods of this package."""

import sys

from parlay.cli import main
from parlay.launch import supervise
from parlay_paper import methods

if __name__ == "__main__":
    methods.register()
    supervise.PROGRAM = (sys.executable, "-m", "parlay_paper")  # of the processes that a distributed run starts
    sys.exit(main())
