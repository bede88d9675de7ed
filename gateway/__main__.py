"""The command `tetrarch`: a table of verbs. Those of the engine's room become `python -m workers ...`.

Imports a verb's parts only when that verb was asked for, so that help is quick and needs no model library.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .serving.paths import Home, home_at

if TYPE_CHECKING:
    from .serving.supervisor import Plan

EXAMPLES = """\
examples:
  tetrarch serve                                   the default model on http://127.0.0.1:8114
  tetrarch serve --model mlx-community/Qwen3-0.6B-4bit --workers 4 --context 32768
  tetrarch run "Name three colours."               one run, its text as it comes
  tetrarch runs watch shelf                        what happens in the session "shelf"
  tetrarch demo                                    16 sub-agent calls, four at a time, and a table
  tetrarch doctor                                  what this machine is and what fits on it
  tetrarch simulate trace.jsonl.gz                 how much of these calls a cache would answer
  tetrarch token add phone                         an access token for calls from other machines

`tetrarch VERB --help` says more.
"""

SERVE_EXAMPLES = """\
examples:
  tetrarch serve                                   until Ctrl-C
  tetrarch serve --model ~/models/some.gguf --kv-bits native
  tetrarch serve --port 9000 --home ~/second       beside another one
  tetrarch serve --settings tetrarch.toml          tables [gateway] and [engine]
  TETRARCH_REDIS_URL=redis://127.0.0.1:6379 tetrarch serve

All flags of `tetrarch engine` are taken too:
"""

TOKEN_EXAMPLES = """\
examples:
  tetrarch token add phone
  tetrarch token add watcher --scopes read
  tetrarch token add sweep --group nightly --class bulk --calls-per-minute 600
  tetrarch token list
  tetrarch token revoke phone
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; a known error is one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbs: dict[str, tuple[str, Callable[[list[str]], int]]] = {
        "serve": ("start bus, engine and gateway and keep them running", _serve),
        "run": ("start one run and show its text as it comes", _run),
        "runs": ("list, show, watch, steer, pause, resume and cancel runs", _runs),
        "mcp": ("let agents that speak MCP start sub-agents here", _mcp),
        "engine": ("run one engine on a bus", _engine),
        "gateway": ("run one gateway on a bus", _gateway),
        "model": ("`model fetch` brings a model to this disk and checks it", _model),
        "token": ("add, list or revoke access tokens", _token),
        "doctor": ("say what this machine is and what fits on it", _doctor),
        "simulate": ("replay a trace of calls: what a pool and its policies would do", _simulate),
        "demo": ("serve, run an orchestrated session, report and stop", _demo),
        "bus-guard": ("", _bus_guard),  # for serve
    }
    parser = argparse.ArgumentParser(
        prog="tetrarch",
        usage="tetrarch VERB [FLAGS]",
        description="Multi-agent inference for long contexts: four workers, one model, one shared cache."
        "\n\nverbs:\n"
        + "\n".join(f"  {name:8} {summary}" for name, (summary, _) in verbs.items() if summary),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if not given or given[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if given else 2
    if given[0] not in verbs:
        parser.error(
            f"there is no verb '{given[0]}': choose from {', '.join(n for n, v in verbs.items() if v[0])}"
        )
    try:
        return verbs[given[0]][1](given[1:])
    except KeyboardInterrupt:
        return 130


def _serve(arguments: list[str]) -> int:
    parser = _settings_parser("serve", "Start bus, engine and gateway and keep them running.", SERVE_EXAMPLES)
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        sys.stdout.flush()
        return _engine_flags()

    def run(options: argparse.Namespace, rest: list[str]) -> int:
        from .serving.supervisor import serve

        return asyncio.run(serve(plan_of(options, rest), os.environ, _say))

    return _with_known_errors(parser, arguments, run)


def plan_of(options: argparse.Namespace, rest: Sequence[str]) -> Plan:
    """What `serve` shall do with its parsed flags and those that are the engine's. Raises SettingsError."""
    from metrics.settings import file_in_force

    from .serving.supervisor import Plan
    from .settings import GatewaySettings, load_settings

    flags = _given(options, GatewaySettings)
    file = file_in_force(options.settings, os.environ)
    settings = load_settings(file, flags)
    shared = [f"--settings={file.absolute()}"] if file else []
    typed = [
        f"--{path.replace('_', '-')}={value}"
        for path, value in flags.items()
        if path not in ("home", "redis_url")  # these two are the children's variables
    ]
    level = [f"--log-level={settings.log_level}"] if "log_level" in flags else []
    return Plan(
        settings=settings,
        home=_home(settings.home),
        gateway_arguments=(*shared, *typed),
        engine_arguments=(*shared, *level, *rest),
        settings_file=file,
    )


def _gateway(arguments: list[str]) -> int:
    parser = _settings_parser("gateway", "Run one gateway on a bus that runs already.", "")

    def run(options: argparse.Namespace, rest: list[str]) -> int:
        from metrics import logs

        from .serving.process import check_exposure, listen, run_gateway
        from .serving.supervisor import LISTEN_VARIABLE
        from .settings import GatewaySettings, load_settings, supervisor_descriptor

        settings = load_settings(options.settings, _given(options, GatewaySettings))
        if rest:
            parser.error(f"unknown: {' '.join(rest)}")
        logs.configure(settings.log_level)
        home = _home(settings.home)
        check_exposure(settings, home)
        inherited = os.environ.get(LISTEN_VARIABLE, "")
        if inherited.isdigit():
            listener = socket.socket(fileno=int(inherited))
        else:
            listener = listen(settings.host, settings.port)
        url = settings.redis_url or home.bus_url
        return asyncio.run(run_gateway(settings, home, url, listener, supervisor_descriptor()))

    return _with_known_errors(parser, arguments, run)


def _bus_guard(arguments: list[str]) -> int:
    parser = _settings_parser("bus-guard", "Run the embedded bus of a home.", "")

    def run(options: argparse.Namespace, rest: list[str]) -> int:
        from .serving.bus_guard import guard_bus
        from .settings import GatewaySettings, load_settings, supervisor_descriptor

        settings = load_settings(options.settings, _given(options, GatewaySettings))
        home = _home(settings.home)
        home.make()
        return guard_bus(home, settings.bus_memory_bytes, supervisor_descriptor(), _say)

    return _with_known_errors(parser, arguments, run)


def _engine(arguments: list[str]) -> int:
    from metrics.settings import LOCAL_BUS_VARIABLE

    home = _home(None)
    if home.socket.exists():  # a `tetrarch serve` runs; for when flags, variables and file name no bus
        os.environ[LOCAL_BUS_VARIABLE] = home.bus_url
    return _workers("engine", *arguments)


def _model(arguments: list[str]) -> int:
    if arguments[:1] != ["fetch"]:
        _say("usage: tetrarch model fetch [--model PATH_OR_HF_REPO]")
        return 0 if {"-h", "--help"} & set(arguments) else 2
    return _workers("model-fetch", *arguments[1:])


def _doctor(arguments: list[str]) -> int:
    return _workers("doctor", *arguments)


def _simulate(arguments: list[str]) -> int:
    return _workers("simulate", *arguments)


def _demo(arguments: list[str]) -> int:
    from .demo.demo import main as demo

    return demo(arguments, os.environ)


def _run(arguments: list[str]) -> int:
    from .cli.run import main as run

    return run(arguments, os.environ)


def _runs(arguments: list[str]) -> int:
    from .cli.runs import main as runs

    return runs(arguments, os.environ)


def _mcp(arguments: list[str]) -> int:
    from importlib.util import find_spec

    from .cli.mcp import MISSING, options_of

    options = options_of(arguments)
    if find_spec("mcp") is None:
        _say(MISSING)
        return 2
    from .mcp.serving import serve_mcp

    return serve_mcp(options, os.environ)


def _token(arguments: list[str]) -> int:
    parser = _token_parser()
    options = parser.parse_args(arguments)
    if (options.name is None) != (options.verb == "list"):
        parser.error("add and revoke take one NAME, list takes none")
    from .callers.tokens import TokenError, TokenStore, grant_of, told

    store = TokenStore(options.tokens_file or _home(options.home).tokens_file)
    try:
        if options.verb == "add":
            given = (options.scopes, options.group, options.calls_per_minute, options.flow_class)
            print(store.add(options.name, grant_of(*given)))
            print("Shown only now. Send it as 'Authorization: Bearer TOKEN'.", file=sys.stderr)
        elif options.verb == "revoke":
            store.revoke(options.name)
        else:
            for token in store.tokens():
                print(told(token))
    except TokenError as error:
        _say(error.message)
        return 2
    return 0


def _token_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tetrarch token",
        description="Access tokens for calls from other machines; only their hashes are kept.",
        epilog=TOKEN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=("add", "list", "revoke"))
    parser.add_argument("name", nargs="?", help="who or what will use it")
    parser.add_argument("--home", type=Path, help="home folder of the gateway")
    parser.add_argument("--tokens-file", type=Path, help="the file, when the settings name another")
    adding = parser.add_argument_group("what an added token may do")
    adding.add_argument(
        "--scopes",
        help="comma-separated: read (look), control (start and steer its own runs), approve (respond where a "
        "run asks), admin (all of it, for everybody's runs); left out: read,control,approve",
    )
    adding.add_argument("--group", default="", help="tokens of one group share runs and cached prefixes")
    adding.add_argument(
        "--calls-per-minute", type=int, metavar="N", help="0: any number; left out: as the settings say"
    )
    adding.add_argument(
        "--class",
        dest="flow_class",
        default="default",
        help="system, interactive, default or bulk: the class of its calls that name none",
    )
    return parser


def _workers(*arguments: str) -> int:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "workers", *arguments])


def _engine_flags() -> int:
    command = [sys.executable, "-m", "workers", "engine", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    print(text.partition("\n\n")[2] or text)
    return 0


def _settings_parser(verb: str, description: str, epilog: str) -> argparse.ArgumentParser:
    from metrics.settings import add_flags

    from .settings import GatewaySettings

    parser = argparse.ArgumentParser(
        prog=f"tetrarch {verb}",
        usage=f"tetrarch {verb} [FLAGS]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--settings", type=Path, metavar="FILE.toml", help="settings file")
    add_flags(parser, GatewaySettings)
    return parser


def _given(options: argparse.Namespace, struct: type) -> dict[str, str]:
    from metrics.settings import given_flags

    return given_flags(options, struct)


def _with_known_errors(
    parser: argparse.ArgumentParser,
    arguments: list[str],
    run: Callable[[argparse.Namespace, list[str]], int],
) -> int:
    from metrics.settings import SettingsError

    from .bus import BusLost
    from .errors import GatewayError
    from .serving.paths import HomeError
    from .serving.process import UnfitGateway
    from .serving.valkey import BusError

    options, rest = parser.parse_known_args(arguments)
    try:
        return run(options, rest)
    except BusLost as error:
        _say(f"{error}")
        return 1
    except (SettingsError, HomeError, UnfitGateway, BusError, GatewayError) as error:
        _say(f"{error}")
        return 2


def _home(folder: Path | None) -> Home:
    return home_at(folder, os.environ)


def _say(words: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(f"tetrarch: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
