"""What a user got wrong, and what became of a run: the ways in which Parlay says no."""


class InputError(ValueError):
    """Wrong input. The message is one line that says what to write instead; the command line exits with 2."""


class Diverged(RuntimeError):
    """A loss was not finite. The message names the stage and the step; the command line exits with 1."""


class StageLost(RuntimeError):
    """Another stage does not answer any more. The message names it; whoever raises this is not to blame."""
