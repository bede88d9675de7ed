"""`tetrarch run`: one run, its text on stdout as it comes, all else on stderr; Ctrl-C cancels it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence

import msgspec

from gateway.client import (
    Budget,
    Client,
    PublicEvent,
    RunBody,
    RunFields,
    RunHandle,
    TetrarchError,
    TokenText,
)
from gateway.flow.classes import CLASSES
from gateway.runs.told import RunInputRequired, RunProgress

from .calling import BRIEF, EPILOG, add_server_flags, client_of, run_command, say, text_given
from .screen import line_of, plain, progress_of

EXAMPLES = """\
examples:
  tetrarch run "Write a haiku about caches."
  git diff | tetrarch run - --session review --agent critic
  tetrarch run "Sum up the plan." --session shelf --class bulk --budget-output 300
  tetrarch run "Name three colours." --json | jq .usage

The text goes to stdout, all else to stderr. Ctrl-C cancels the run. It is a run like all others: `tetrarch
runs` shows, steers and pauses it from another window. Exit code 0: it completed.

"""

CANCEL_SECONDS = 5.0


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the command."""
    parser = _parser()
    options = parser.parse_args(arguments)
    prompt = text_given(options.prompt)
    if not prompt.strip():
        parser.error("the prompt is empty")
    return run_command(_run(options, prompt, environ))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tetrarch run",
        description="Start one run and show its text as it comes.",
        epilog=EXAMPLES + EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", help="what to say to the model; - reads it from stdin")
    parser.add_argument("--session", metavar="NAME", help="the session that the run belongs to")
    parser.add_argument("--agent", metavar="NAME", help="the agent that it is; left out: one of its own")
    parser.add_argument("--class", dest="flow_class", choices=CLASSES, help="how urgent it is")
    parser.add_argument("--model", metavar="NAME", help="the model; left out: the only one, or the first")
    parser.add_argument(
        "--budget-output", type=int, metavar="N", help="output tokens, thinking included, that it may use"
    )
    parser.add_argument("--json", action="store_true", help="the whole run as JSON instead of its text")
    add_server_flags(parser)
    return parser


async def _run(options: argparse.Namespace, prompt: str, environ: Mapping[str, str]) -> int:
    async with client_of(options, environ, BRIEF) as brief, client_of(options, environ) as client:
        run = await _spawn(brief, options, prompt)
        try:
            ended = await _show(client.handle(run.id), shows_text=not options.json)
        except (asyncio.CancelledError, BrokenPipeError):
            await _cancel(run)
            raise
    if options.json:
        sys.stdout.write(f"{msgspec.json.encode(ended).decode()}\n")
    return 0 if ended.status == "completed" else 1


async def _spawn(client: Client, options: argparse.Namespace, prompt: str) -> RunHandle:
    """A run that is stopped while it is being made is cancelled as soon as its id is known."""
    fields = RunFields(input=prompt)
    if options.budget_output is not None:
        fields["budget"] = Budget(output_tokens=options.budget_output)
    names = {name: getattr(options, name) for name in ("session", "agent", "flow_class", "model")}
    fields.update({name: value for name, value in names.items() if value is not None})  # type: ignore[typeddict-item]
    spawning = asyncio.ensure_future(client.spawn(**fields))
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        with contextlib.suppress(TetrarchError, TimeoutError):
            await _cancel(await asyncio.wait_for(spawning, CANCEL_SECONDS))
        raise


async def _cancel(run: RunHandle) -> None:
    try:
        told = await asyncio.wait_for(run.cancel(), CANCEL_SECONDS)
        say(f"{run.id}: {told.status}")
    except (TetrarchError, TimeoutError) as error:
        say(f"{run.id} may still run: {error or 'no answer in time'}")


async def _show(run: RunHandle, *, shows_text: bool) -> RunBody:
    is_screen = sys.stdout.isatty()
    shown, ends_line = "", True
    async with run.stream() as events:
        async for event in events:
            if isinstance(event, TokenText):
                if shows_text and event.text:
                    sys.stdout.write(plain(event.text) if is_screen else event.text)
                    sys.stdout.flush()
                    ends_line = event.text.endswith("\n")
                continue
            line = _status(event)
            if line is not None and line != shown:
                if not ends_line:
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                    ends_line = True
                shown = line
                say(f"{run.id}: {line}")
            if isinstance(event, RunInputRequired):
                break  # nobody here can answer
    return await run.read()


def _status(event: PublicEvent) -> str | None:
    return progress_of(event) if isinstance(event, RunProgress) else line_of(event)
