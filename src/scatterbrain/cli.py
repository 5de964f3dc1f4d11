"""The command line: parses and delegates."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from . import __version__, cli_analyze
from .lab.extras import LabError


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parser().parse_args(arguments)
        options.run(options, shlex.join(["scatterbrain", *arguments]))
    except KeyboardInterrupt as stop:
        return _fail(f"interrupted; {stop or 'no record was written'}", 130)
    except (LabError, OSError, ValueError) as error:
        return _fail(str(error), 1)
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="scatterbrain", description="Attention that is exact on a sparse support and low-rank elsewhere, for PyTorch.")
    top.add_argument("--version", action="version", version=f"scatterbrain {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_calibrate(commands)
    _add_evaluate(commands)
    _add_demo(commands)
    _add_quality(commands)
    _add_errors(commands)
    _add_bench(commands)
    cli_analyze.add(commands, _Help)
    return top


def share(text: str) -> float:
    """A budget as one writes it: 1/8 or 0.125."""
    try:
        return float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write 1/8 or 0.125") from None


MODEL = "a folder that transformers loads, a name on its hub, or minilm, smollm2 or whisper, which are fetched"
TEXT = "a text file; without one, WikiText-2 (for whisper: speech) in the folder that SCATTERBRAIN_DATA names"


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .calibration.fit import OBJECTIVES, POLICIES

    text = "plan a pretrained model's attention: how each head is computed within a budget"
    about = "Watch every attention layer of a model on some text, measure, plan each head within the budget; print the plan and write it as JSON."
    fit = commands.add_parser("calibrate", help=text, description=about, formatter_class=_Help)
    fit.set_defaults(run=_run_fit, what="run_calibrate")
    fit.add_argument("--model", required=True, metavar="NAME", help=MODEL)
    fit.add_argument("--text", metavar="FILE", help=f"{TEXT}; its first windows are taken")
    aim = fit.add_mutually_exclusive_group()
    aim.add_argument("--budget", type=share, metavar="B", help="mean share of the visible entries, such as 1/8 (the default)")
    aim.add_argument("--error", type=float, metavar="E", help="instead: the smallest budget with this mean error, such as 0.05")
    fit.add_argument("--policy", choices=POLICIES, default="measured", help="how the budget is shared out")
    what = "what 'measured' makes small: the matrix' error, or that and the model's output (default with a budget)"
    fit.add_argument("--objective", choices=OBJECTIVES, help=what)
    _add_common(fit)
    fit.add_argument("--out", metavar="FILE", default="plan.json", help="where the plan is written")


def _add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "measure a plan: error a layer and head, and the task, time and memory before and after"
    about = (
        "Run the model exactly and measure at every attention call what the plan gives in its place; then run it exactly and converted, and "
        "compare what a user sees (perplexity, a transcript or embeddings), seconds and memory. Use another text than the plan was made with."
    )
    measure = commands.add_parser("evaluate", help=text, description=about, formatter_class=_Help)
    measure.set_defaults(run=_run_fit, what="run_evaluate")
    measure.add_argument("--model", required=True, metavar="NAME", help=MODEL)
    measure.add_argument("--plan", required=True, metavar="FILE", help="what scatterbrain calibrate wrote")
    measure.add_argument("--text", metavar="FILE", help=f"{TEXT}; its last windows are taken")
    measure.add_argument("--fallback", choices=("raise", "exact"), default="raise", help="what happens to calls that cannot be approximated")
    _add_common(measure)
    measure.add_argument("--out", metavar="FILE", help="also write everything as JSON")


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--inputs", type=int, metavar="N", default=4, help="windows of text")
    command.add_argument("--length", type=int, metavar="N", help="tokens a window; without it 2,048 or what the model takes")
    command.add_argument("--seed", type=int, metavar="N", default=0, help="of sampled rows and random parts")
    command.add_argument("--threads", type=int, metavar="N", help="of torch; without it as many as torch takes")


def _add_quality(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .lab.quality import METHODS, QualityConfig
    from .lab.subjects import CARRIED
    from .lab.tasks import TASKS

    text = "what a user of a converted model notices, beside every baseline at the same budget"
    about = (
        "Convert pretrained models by our plan and by every baseline, all layers, nothing retrained, and compare embeddings and retrieval (minilm), "
        "a transcript (whisper), perplexity and greedy generation (smollm2). A record that exists goes on where it was."
    )
    quality = commands.add_parser("quality", help=text, description=about, formatter_class=_Help, argument_default=argparse.SUPPRESS)
    usual = QualityConfig()
    quality.set_defaults(run=_run_quality)
    quality.add_argument("--data", nargs="+", choices=CARRIED, metavar="NAME", help=f"models (default: {' '.join(CARRIED)})")
    quality.add_argument("--budget", type=share, metavar="B", help="share of the entries that a method may spend (default: 1/8)")
    quality.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help=f"some of: {', '.join(METHODS)} (default: all)")
    names = [task for tasks in TASKS.values() for task in tasks]
    quality.add_argument("--tasks", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)} (default: all)")
    quality.add_argument("--policy", help=f"of our plan (default: {usual.policy})")
    quality.add_argument("--plans", metavar="FOLDER", help="read our plans from here, and write them here when they are made")
    quality.add_argument("--seed", type=int, metavar="N", help=f"of our plan (default: {usual.seed})")
    quality.add_argument("--threads", type=int, metavar="N", help="of torch; without it as many as torch takes")
    quality.add_argument("--out", metavar="FILE", help=f"the record (default: {usual.out})")
    quality.add_argument("--fresh", action="store_true", help="start over, though the record exists")


def _add_errors(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .lab.matrix import METHODS, ErrorsConfig
    from .lab.subjects import CARRIED

    text = "error of the attention matrix of pretrained models, beside every baseline and the oracles, at equal budgets"
    about = "Plan each model on some inputs, measure on others: matrix and output error, mean over heads. A record that exists goes on where it was."
    errors = commands.add_parser("errors", help=text, description=about, formatter_class=_Help, argument_default=argparse.SUPPRESS)
    usual = ErrorsConfig()
    errors.set_defaults(run=_run_errors)
    errors.add_argument("--data", nargs="+", choices=CARRIED, metavar="NAME", help=f"models (default: {' '.join(CARRIED)})")
    errors.add_argument("--budgets", nargs="+", type=share, metavar="B", help="shares of the entries (default: 1/4 1/8 1/16 1/32)")
    errors.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help=f"some of: {', '.join(METHODS)} (default: all)")
    errors.add_argument("--inputs", type=int, metavar="N", help=f"that are measured (default: {usual.inputs})")
    errors.add_argument("--plans", metavar="FOLDER", help="read our plans from here, and write them here when they are made")
    errors.add_argument("--seed", type=int, metavar="N", help=f"of our plan (default: {usual.seed})")
    errors.add_argument("--threads", type=int, metavar="N", help="of torch; without it as many as torch takes")
    errors.add_argument("--out", metavar="FILE", help=f"the record (default: {usual.out})")
    errors.add_argument("--fresh", action="store_true", help="start over, though the record exists")


def _run_errors(options: argparse.Namespace, command: str) -> None:
    from .lab.matrix import ErrorsConfig, run

    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(options).items() if name != "run"}
    run(ErrorsConfig(**given), command)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .lab.demo import DATA, DemoConfig

    text = "a pretrained encoder converted, before and after; or error and time of attention at equal budgets"
    about = (
        "model: fetch a pretrained encoder (MiniLM), calibrate, convert every layer, print a before/after table with the published pair beside "
        "it, and write a page with pictures. process1, minilm: error and time of full, sparse, low-rank and combined attention at equal budgets, "
        "on clustered data (the paper's Process 1: over a grid of sizes and temperatures, and timed at one cell) and on the encoder's attention."
    )
    demo = commands.add_parser("demo", help=text, description=about, formatter_class=_Help)
    demo.set_defaults(run=_run_demo)
    what = demo.add_argument_group("what is measured")
    what.add_argument("--budget", type=share, metavar="B", help="share of the entries that a method may spend, such as 1/8")
    what.add_argument("--data", nargs="+", choices=DATA, metavar="NAME", help=f"some of {', '.join(DATA)}")
    what.add_argument("--documents", type=int, metavar="N", help="texts of 512 tokens for the encoder; as many more to calibrate on")
    what.add_argument("--seed", type=int, metavar="N", help="of the clustered data and of the plan")
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


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .lab.bench import CONTENDERS, DTYPES, QUICK, BenchConfig
    from .lab.cases import DATA

    text = "time, memory and error of attention against length, beside SDPA and other packages"
    about = (
        f"Measure {text}: on random numbers, on the paper's Process 1 and on the attention of pretrained models. "
        "Each result is compared with a dense definition before it is timed; a wrong one is refused. "
        "Times are taken in turns, memory in fresh processes. Prints tables, writes bench.json and three figures. "
        "A run that was stopped goes on from its record when the same command is given again."
    )
    usual = vars(BenchConfig())

    def default(name: str) -> str:
        value = usual[name]
        return f"(default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})"

    # Only what is given is set, so that --quick can tell the rest from it.
    bench = commands.add_parser("bench", help=text, description=about, formatter_class=_Help, argument_default=argparse.SUPPRESS)
    bench.set_defaults(run=_run_bench)
    what = bench.add_argument_group("what is measured")
    what.add_argument("--lengths", nargs="+", type=int, metavar="N", help=f"tokens of the made inputs {default('lengths')}")
    what.add_argument("--data", nargs="+", choices=DATA, metavar="NAME", help=f"inputs {default('data')}")
    what.add_argument("--methods", nargs="+", choices=tuple(CONTENDERS), metavar="NAME", help=f"contenders, sdpa among them {default('methods')}")
    what.add_argument("--heads", type=int, metavar="N", help=f"of the made inputs {default('heads')}")
    what.add_argument("--width", type=int, metavar="N", help=f"of a head of the made inputs {default('width')}")
    what.add_argument("--causal", action="store_true", help="causal attention on the made inputs; SmolLM2's always is")
    what.add_argument("--dtype", choices=DTYPES, help=f"of the inputs {default('dtype')}")
    what.add_argument("--impl", metavar="NAME", help=f"our implementation: auto, torch or native {default('impl')}")
    what.add_argument("--seed", type=int, metavar="N", help=f"of inputs and methods {default('seed')}")
    how = bench.add_argument_group("how")
    how.add_argument(
        "--quick", action="store_true", help=f"under two minutes: {', '.join(map(str, QUICK['lengths']))} tokens, forward, few contenders"
    )
    how.add_argument("--no-backward", dest="backward", action="store_false", help="forward passes only")
    how.add_argument("--no-memory", dest="memory", action="store_false", help="no fresh processes, no peak memory")
    how.add_argument("--repeats", type=int, metavar="N", help=f"times are the median of so many, after one to warm up {default('repeats')}")
    how.add_argument("--longest", type=float, metavar="SECONDS", help=f"leave out calls that take longer {default('longest')}")
    how.add_argument("--threads", type=int, metavar="N", help="of torch; without it as many as torch takes")
    how.add_argument("--out", metavar="FOLDER", help=f"for the record and the figures {default('out')}")
    how.add_argument("--fresh", action="store_true", help="start over, though the folder holds a record")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where none is set."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = action.default in (None, argparse.SUPPRESS)
        if isinstance(action.default, tuple):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return action.help if hidden else super()._get_help_string(action)


def _run_demo(options: argparse.Namespace, command: str) -> None:
    from .lab.demo import DemoConfig, run

    given = {name: value for name, value in vars(options).items() if name != "run"}
    run(DemoConfig(**{**given, "data": tuple(given["data"])}), command)


def _run_bench(options: argparse.Namespace, command: str) -> None:
    from .lab.bench import QUICK, BenchConfig, run

    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(options).items() if name != "run"}
    quick, fresh = given.pop("quick", False), given.pop("fresh", False)
    run(BenchConfig(**{**(QUICK if quick else {}), **given}), command, fresh)


def _run_fit(options: argparse.Namespace, command: str) -> None:
    from .lab import fit_model

    given = {name: value for name, value in vars(options).items() if name not in ("run", "what")}
    getattr(fit_model, options.what)(fit_model.FitConfig(**given))


def _run_quality(options: argparse.Namespace, command: str) -> None:
    from .lab.quality import QualityConfig, run

    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(options).items() if name != "run"}
    run(QualityConfig(**given), command)


def _fail(text: str, code: int) -> int:
    print(f"scatterbrain: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
