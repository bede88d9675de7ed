"""`tetrarch runs`: what runs there are, what becomes of them, and verbs that change it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.client import Client, VerbBody
from gateway.runs.outcomes import FINAL

from .calling import BRIEF, EPILOG, add_server_flags, client_of, run_command, text_given
from .screen import line_of, one_line, run_lines, table, tree_lines

EXAMPLES = """\
verbs:
  tetrarch runs                        the newest runs; --session, --agent, --status choose among them
  tetrarch runs show ID                one run and its result
  tetrarch runs tree SESSION           a session's agents, each below the one that called it
  tetrarch runs watch SESSION          what happens in a session, line by line, until Ctrl-C
  tetrarch runs steer ID "Be brief."   put a text before the model: now, at its next turn, or in line
  tetrarch runs pause ID               stop it at the next token; its worker is free for others
  tetrarch runs resume ID              go on where it was
  tetrarch runs cancel ID --tree       end it, with all that descends from it

`tetrarch runs VERB --help` says more. Each verb may be given again: it is then done already.

"""

Work = Callable[[Client, argparse.Namespace], Coroutine[Any, Any, None]]


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the command."""
    verbs: dict[str, tuple[Callable[[], argparse.ArgumentParser], Work]] = {
        "show": (_show_parser, _show),
        "tree": (_tree_parser, _tree),
        "watch": (_watch_parser, _watch),
        "steer": (_steer_parser, _steer),
        "pause": (_pause_parser, _pause),
        "resume": (_resume_parser, _resume),
        "cancel": (_cancel_parser, _cancel),
    }
    verb, *rest = arguments or ("",)
    make, work = verbs.get(verb, (_list_parser, _list))
    parser = make()
    if verb not in verbs and verb and not verb.startswith("-"):
        parser.error(f"there is no verb '{one_line(verb, 40)}': choose from {', '.join(verbs)}")
    add_server_flags(parser)
    options = parser.parse_args(rest if verb in verbs else arguments)
    return run_command(_with_client(options, environ, work))


async def _with_client(options: argparse.Namespace, environ: Mapping[str, str], work: Work) -> int:
    patience = None if options.is_patient else BRIEF
    async with client_of(options, environ, patience) as client:
        await work(client, options)
    return 0


def _parser(
    verb: str, description: str, *, epilog: str = "", is_patient: bool = False
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tetrarch runs {verb}".rstrip(),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(is_patient=is_patient)
    return parser


def _list_parser() -> argparse.ArgumentParser:
    parser = _parser("", "Show runs, newest first, or do something with one.", epilog=EXAMPLES + EPILOG)
    parser.add_argument("--session", metavar="NAME", help="only those of this session")
    parser.add_argument("--agent", metavar="NAME", help="only those of this agent")
    parser.add_argument(
        "--status", metavar="STATUS", help=f"only those: decoding, paused, {', '.join(FINAL)} ..."
    )
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="at most so many (20)")
    _add_json(parser, "a JSON object a line")
    return parser


async def _list(client: Client, options: argparse.Namespace) -> None:
    names = {name: getattr(options, name) for name in ("session", "agent", "status")}
    filters = {name: value for name, value in names.items() if value is not None}
    lines = [line async for line in client.runs(max(1, options.limit), **filters)]
    _write(map(_json, lines) if options.json else table(lines, time.time()))


def _show_parser() -> argparse.ArgumentParser:
    parser = _parser("show", "Show one run and, once it has ended, its result.")
    _add_id(parser)
    _add_json(parser, "all there is, as JSON")
    return parser


async def _show(client: Client, options: argparse.Namespace) -> None:
    run = await client.read(options.id)
    _write([_json(run)] if options.json else run_lines(run))


def _tree_parser() -> argparse.ArgumentParser:
    parser = _parser("tree", "Show a session's agents and their runs.")
    parser.add_argument("session", help="the session's name")
    _add_json(parser, "as JSON")
    return parser


async def _tree(client: Client, options: argparse.Namespace) -> None:
    tree = await client.tree(options.session)
    _write([_json(tree)] if options.json else tree_lines(tree))


def _watch_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "watch",
        "Show what happens to a session's runs, from its beginning, until Ctrl-C. Goes on over restarts.",
        is_patient=True,
    )
    parser.add_argument("session", help="the session's name")
    _add_json(parser, "an event a line")
    return parser


async def _watch(client: Client, options: argparse.Namespace) -> None:
    async with client.events(options.session) as events:
        async for event in events:
            line = _json(event) if options.json else line_of(event)
            if line is not None:
                moment = "" if options.json else f"{time.strftime('%H:%M:%S')}  {one_line(event.run, 40)}  "
                _write([moment + line])


def _steer_parser() -> argparse.ArgumentParser:
    parser = _parser("steer", "Put a text before the model as the user's. It says what became of it.")
    _add_id(parser)
    parser.add_argument("text", help="the text; - reads it from stdin")
    parser.add_argument(
        "--when",
        choices=("now", "next_turn", "queue"),
        default="now",
        help="at the next token (now), behind the present turn, or in line for a turn of its own",
    )
    return parser


async def _steer(client: Client, options: argparse.Namespace) -> None:
    _tell(await client.steer(options.id, text_given(options.text), options.when))


def _pause_parser() -> argparse.ArgumentParser:
    parser = _parser("pause", "Stop a run at its next token. It stays so until it is resumed or cancelled.")
    _add_id(parser)
    parser.add_argument("--hold", type=float, metavar="SECONDS", help="how long what it computed is kept")
    return parser


async def _pause(client: Client, options: argparse.Namespace) -> None:
    _tell(await client.pause(options.id, None if options.hold is None else round(1000 * options.hold)))


def _resume_parser() -> argparse.ArgumentParser:
    parser = _parser("resume", "Go on with a paused run.")
    _add_id(parser)
    return parser


async def _resume(client: Client, options: argparse.Namespace) -> None:
    _tell(await client.resume(options.id))


def _cancel_parser() -> argparse.ArgumentParser:
    parser = _parser("cancel", "End a run. What it had said is kept.")
    _add_id(parser)
    parser.add_argument("--graceful", action="store_true", help="at the end of its present turn")
    parser.add_argument("--tree", action="store_true", help="all that descends from it, too")
    return parser


async def _cancel(client: Client, options: argparse.Namespace) -> None:
    _tell(await client.cancel(options.id, "graceful" if options.graceful else "now", tree=options.tree))


def _tell(told: VerbBody) -> None:
    """The status, then what the verb adds."""
    facts = msgspec.to_builtins(told)
    more = (f"{name} {value}" for name, value in facts.items() if name not in ("id", "status"))
    _write([", ".join([f"{told.id}: {told.status}", *more])])


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the run's id: run-...")


def _add_json(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--json", action="store_true", help=words)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
