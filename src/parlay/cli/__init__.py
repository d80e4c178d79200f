"""The command line. Flags come from the recipe's fields; torch is loaded only once there is something to run.

train  compare  bench  plan  report  data  demo     a file for each command: its flags, and what it does with them
flags     the parser, and recipes made from flags
streams   output that cannot end a run
exits     exit codes: 0 finished, 1 the run failed, 2 wrong input, answered in one line that says what to write
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence

from parlay import __version__
from parlay.cli import bench, compare, data, demo, plan, report, reproduce, train
from parlay.cli.exits import FAILED, WRONG, OutOfMemory, say_no
from parlay.cli.flags import Parser, check_command, check_paths, refuse_word
from parlay.cli.streams import forgiving_streams
from parlay.errors import InputError, StageLost

COMMANDS = (demo, train, plan, compare, bench, reproduce, report, data)


def main(words: Sequence[str] | None = None) -> int:
    with forgiving_streams():
        return _main(list(sys.argv[1:] if words is None else words))


def _main(words: list[str]) -> int:
    try:
        parser = make_parser()
        check_command(parser, words)
        given, unknown = parser.parse_known_args(words)
        if unknown:
            refuse_word(parser, given, unknown[0])
        check_paths(given)
        given.line = shlex.join(["parlay", *words])
        return int(given.run(given))
    except InputError as error:
        return say_no(str(error), WRONG, error)
    except KeyboardInterrupt:
        return say_no("interrupted", FAILED)
    except MemoryError as error:
        line = f"out of memory ({error}): write --store file, --downsample 2 or a smaller --batch-size"
        return say_no(line, FAILED, error)
    except (OutOfMemory, StageLost) as error:
        return say_no(str(error), FAILED, error)
    except Exception as error:  # the last resort: a line for the user, the rest for whoever asks for it
        if os.environ.get("PARLAY_DEBUG") == "1":
            traceback.print_exc()
        what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return say_no(f"{what} (PARLAY_DEBUG=1 shows where)", FAILED, error)


def make_parser() -> Parser:
    parser = Parser(prog="parlay", description="Train deep networks with their layers in parallel.")
    parser.add_argument("--version", action="version", version=f"parlay {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
