"""The command line: parses and delegates."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from . import __version__
from .lab.extras import LabError


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parser().parse_args(arguments)
        options.run(options, shlex.join(["scatterbrain", *arguments]))
    except KeyboardInterrupt:
        return _fail("interrupted; no record was written", 130)
    except (LabError, OSError, ValueError) as error:
        return _fail(str(error), 1)
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="scatterbrain", description="Attention that is exact on a sparse support and low-rank elsewhere, for PyTorch.")
    top.add_argument("--version", action="version", version=f"scatterbrain {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    return top


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .lab.demo import DATA, DemoConfig

    text = "error and time of full, sparse, low-rank and combined attention at equal budgets"
    about = (
        f"Measure the {text}, on clustered data (the paper's Process 1: over a grid of cluster sizes and temperatures, and timed at one cell) "
        "and on a pretrained encoder's attention; print tables, write a figure and a record."
    )
    demo = commands.add_parser("demo", help=text, description=about, formatter_class=_Help)
    demo.set_defaults(run=_run_demo)
    what = demo.add_argument_group("what is measured")
    what.add_argument("--budget", type=float, metavar="B", help="share of the entries that a method may spend")
    what.add_argument("--data", nargs="+", choices=DATA, metavar="NAME", help=f"{' and '.join(DATA)}, or one of them")
    what.add_argument("--documents", type=int, metavar="N", help="texts of 512 tokens for the encoder")
    what.add_argument("--seed", type=int, metavar="N", help="of the clustered data")
    made = demo.add_argument_group("clustered data")
    made.add_argument("--length", type=int, metavar="N", help="tokens, where timed")
    made.add_argument("--heads", type=int, metavar="N", help="heads, each drawn by itself, where timed")
    made.add_argument("--width", type=int, metavar="N", help="width of a head")
    made.add_argument(
        "--cluster-size",
        type=int,
        metavar="N",
        help="tokens in a cluster, where timed; with the beta factor's, this default is the cell where our own error is the median",
    )
    beta = "inverse temperature, where timed, in units of the middle one, log(length) / sqrt(width)"
    made.add_argument("--beta-factor", type=float, metavar="X", help=beta)
    made.add_argument("--delta", type=float, metavar="X", help="spread of a cluster")
    made.add_argument("--matrix-heads", type=int, metavar="N", help="heads whose whole matrix is compared, where timed")
    made.add_argument("--grid-length", type=int, metavar="N", help="tokens in each cell of the grid")
    made.add_argument("--grid-draws", type=int, metavar="N", help="draws of each cell; its error is their median")
    how = demo.add_argument_group("how")
    how.add_argument("--repeats", type=int, metavar="N", help="times are the least of so many")
    how.add_argument("--threads", type=int, metavar="N", help="of torch; without it as many as torch takes")
    how.add_argument("--out", metavar="FOLDER", help="for the figure and the record")
    demo.set_defaults(**vars(DemoConfig()))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where none is set."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = action.default in (None, argparse.SUPPRESS)
        if isinstance(action.default, tuple):
            return f"{action.help} (default: {' '.join(action.default)})"
        return action.help if hidden else super()._get_help_string(action)


def _run_demo(options: argparse.Namespace, command: str) -> None:
    from .lab.demo import DemoConfig, run

    given = {name: value for name, value in vars(options).items() if name != "run"}
    run(DemoConfig(**{**given, "data": tuple(given["data"])}), command)


def _fail(text: str, code: int) -> int:
    print(f"scatterbrain: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
