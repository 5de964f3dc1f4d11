"""`scatterbrain analyze` and `scatterbrain report`: options come from each study's config."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

from .lab.study import Study

Commands = Any


def add(commands: Commands, help_format: type[argparse.HelpFormatter]) -> None:
    from .lab.analyze import studies

    text = "why sparse, low-rank or both fit attention: the paper's observations and theorems, measured"
    about = (
        f"See {text}. Each study writes a record (JSON), a figure (PNG and SVG), and prints its numbers; one that was stopped "
        "goes on where it was when the same command is given again. `scatterbrain report` makes a page of the records."
    )
    top = commands.add_parser("analyze", help=text, description=about, formatter_class=help_format)
    group = top.add_subparsers(title="studies", metavar="STUDY", required=True)
    for name, study in studies().items():
        _add_study(group.add_parser(name, help=study.about, description=f"{study.title}: {study.about}.", formatter_class=help_format), study)
    every = group.add_parser("all", help="every study with its usual settings", description="Every study in turn.", formatter_class=help_format)
    every.add_argument("--out", metavar="FOLDER", default="records", help="folder for the records and the figures")
    every.add_argument("--fresh", action="store_true", default=argparse.SUPPRESS, help="do again what the folder holds already")
    every.set_defaults(run=_run_all)
    _add_report(commands, help_format)


def _add_study(parser: argparse.ArgumentParser, study: Study) -> None:
    hints = typing.get_type_hints(study.config)
    for field in dataclasses.fields(study.config):
        many = typing.get_origin(hints[field.name]) is tuple
        kind = typing.get_args(hints[field.name])[0] if many else hints[field.name]
        options: dict[str, Any] = {"help": field.metadata["help"], "default": field.default, "dest": field.name}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": kind, "metavar": "FOLDER" if field.name == "out" else {"int": "N", "float": "X"}.get(kind.__name__, "NAME")}
            if many:
                options["nargs"] = "+"
            if field.metadata["choices"]:
                options["choices"] = field.metadata["choices"]
        parser.add_argument("--" + field.name.replace("_", "-"), **options)
    fresh = "start over, though the folder holds an unfinished run"
    parser.add_argument("--fresh", action="store_true", default=argparse.SUPPRESS, help=fresh)
    parser.set_defaults(run=lambda given, command: _run(study, given, command))


def _run(study: Study, options: argparse.Namespace, command: str) -> None:
    from .lab.study import run

    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(options).items() if name not in ("run", "fresh")}
    run(study, study.config(**given), command, getattr(options, "fresh", False))


def _run_all(options: argparse.Namespace, command: str) -> None:
    from .lab.analyze import studies
    from .lab.study import finished, run

    fresh = getattr(options, "fresh", False)
    for study in studies().values():
        config = study.config(out=options.out)
        print(f"\n{study.title}: {study.about}", flush=True)
        if finished(study, config) and not fresh:
            print(f"{options.out}/{study.name}.json is complete; --fresh measures it again")
            continue
        run(study, config, f"scatterbrain analyze {study.name}", fresh)


def _add_report(commands: Commands, help_format: type[argparse.HelpFormatter]) -> None:
    text = "one page of all saved records: interactive plots, no network, opens from disk"
    report = commands.add_parser("report", help=text, description=f"Write {text}. Nothing is measured.", formatter_class=help_format)
    report.add_argument("--records", metavar="FOLDER", default="records", help="where `scatterbrain analyze` wrote")
    report.add_argument("--out", metavar="FILE", default="report.html", help="the page")
    report.set_defaults(run=_run_report)


def _run_report(options: argparse.Namespace, command: str) -> None:
    from pathlib import Path

    from .lab.report import write

    write(Path(options.records), Path(options.out))
