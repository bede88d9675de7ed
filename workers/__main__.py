"""The commands of this room: `python -m workers engine|model-fetch|doctor|simulate`, which `tetrarch` starts.

Exit codes: 0 done or stopped, 1 failed while running, 2 settings, bus, model or trace that cannot be used,
which is also how `doctor` says that an engine would not start.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from metrics import logs
from metrics.settings import SettingsError, add_flags, given_flags

from . import simulate
from .errors import EngineIdInUse, ModelError, TraceError, WorkersError
from .errors import SettingsError as UnfitSettings
from .machine import load_blas
from .settings import EngineSettings, load_settings

_PROGRESS_WIDTH = 60

ENGINE_EXAMPLES = """\
examples:
  tetrarch engine --redis-url unix:///run/bus.sock
  tetrarch engine --model mlx-community/Qwen3-0.6B-4bit --workers 2 --context 16384
  tetrarch engine --kv-bits native --no-prefix-cache --settings tetrarch.toml
  TETRARCH_ENGINE_WORKERS=8 tetrarch engine --engine-id upstairs

`tetrarch serve` takes the same flags and starts the bus and the gateway too.
"""

FETCH_EXAMPLES = """\
examples:
  tetrarch model fetch                                    the default model, 95 MB
  tetrarch model fetch --model mlx-community/Qwen3-0.6B-4bit
  tetrarch model fetch --model ~/models/some.gguf         converts it once
"""

DOCTOR_EXAMPLES = """\
examples:
  tetrarch doctor
  tetrarch doctor --model mlx-community/Qwen3-8B-4bit --workers 4 --context 131072
  tetrarch doctor --model FOLDER --memory 96GB --weights native    for a Mac; config.json alone is enough

Exit code 2: the model cannot be used, or does not fit with these settings.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; a known error is one line on stderr."""
    options = _parser().parse_args(arguments)
    verb: Callable[[argparse.Namespace], int] = options.verb
    try:
        return verb(options)
    except (SettingsError, UnfitSettings, ModelError, EngineIdInUse, TraceError) as error:
        return _refuse(error, code=2)
    except WorkersError as error:
        return _refuse(error, code=1)
    except KeyboardInterrupt:
        return 130


def _simulate(options: argparse.Namespace) -> int:
    logs.configure("warning")
    asked = simulate.parse(options)
    reports = simulate.simulate(asked, _tell_progress)
    _tell_progress("")
    try:
        print(reports.json() if asked.as_json else reports.table(), flush=True)
    except BrokenPipeError:  # whoever reads has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _tell_progress(text: str) -> None:
    """In one line of a terminal, over what was there; nothing where nobody looks."""
    if sys.stderr.isatty():
        print(f"\r{text:<{_PROGRESS_WIDTH}}\r", end="", file=sys.stderr, flush=True)


def _with_settings(verb: Callable[[EngineSettings], int]) -> Callable[[argparse.Namespace], int]:
    """A verb that takes the engine's settings instead of its own flags."""

    def run(options: argparse.Namespace) -> int:
        settings = load_settings(options.settings, given_flags(options, EngineSettings))
        logs.configure(settings.log_level)
        return verb(settings)

    return run


def _engine(settings: EngineSettings) -> int:
    from .process import run_engine

    return run_engine(settings)


def _fetch(settings: EngineSettings) -> int:
    load_blas()
    from .fetch import cache_dir, resolve_model

    folder = resolve_model(settings.model, cache_dir(os.environ), progress=print)
    print(folder)
    return 0


def _doctor(settings: EngineSettings) -> int:
    load_blas()
    from .doctor import doctor

    report = doctor(settings, os.environ)
    print(report.text)
    return 0 if report.is_fit else 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the other refusals do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _parser() -> _Parser:
    parser = _Parser(prog="tetrarch", description="One model, four workers, one shared cache.")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    _add_verb(verbs, "engine", _engine, "run one engine on a bus", ENGINE_EXAMPLES)
    _add_verb(verbs, "model-fetch", _fetch, "bring a model to this disk and check it", FETCH_EXAMPLES)
    _add_verb(verbs, "doctor", _doctor, "say what this machine is and what fits on it", DOCTOR_EXAMPLES)
    _add_simulate(verbs)
    return parser


def _add_simulate(verbs: argparse._SubParsersAction[_Parser]) -> None:
    parser = verbs.add_parser(
        "simulate",
        prog="tetrarch simulate",
        help="replay a trace without a model",
        description=simulate.DESCRIPTION,
        epilog=simulate.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(verb=_simulate)
    simulate.add_arguments(parser)


def _add_verb(
    verbs: argparse._SubParsersAction[_Parser],
    name: str,
    verb: Callable[[EngineSettings], int],
    summary: str,
    examples: str,
) -> None:
    parser = verbs.add_parser(
        name,
        prog=f"tetrarch {name.replace('-', ' ')}",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(verb=_with_settings(verb))
    parser.add_argument("--settings", type=Path, metavar="FILE.toml", help="settings file, table [engine]")
    add_flags(parser, EngineSettings)


def _refuse(error: Exception, *, code: int) -> int:
    print(f"tetrarch: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
