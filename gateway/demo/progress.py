"""What the demo shows while it runs: a live line per call on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from typing import TextIO

from .report import CallResult

_ERASE_BELOW = "\x1b[0J"
_REDRAW_SECONDS = 0.1


@dataclass(slots=True)
class LiveCall:
    """One call in flight; `answer` grows as it is streamed."""

    agent: str
    round: int
    answer: str = ""
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None  # monotonic


class Progress:
    """Writes to `output`; calls are shown between `begin` and `end`."""

    def __init__(self, output: TextIO, num_calls: int) -> None:
        self._output = output
        self._is_terminal = output.isatty()
        self._num_calls = num_calls
        self._num_ended = 0
        self._live: list[LiveCall] = []
        self._num_drawn = 0
        self._drawn_at = 0.0
        self._started = time.monotonic()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._output.write(f"{self._erased()}{line}\n")
        self._draw()
        self._output.flush()

    def begin(self, call: LiveCall) -> None:
        """A call was sent."""
        self._live.append(call)
        self.tick()

    def tick(self) -> None:
        """Something moved: redraw, at most ten times a second."""
        if self._is_terminal and time.monotonic() - self._drawn_at >= _REDRAW_SECONDS:
            self._output.write(self._erased())
            self._draw()
            self._output.flush()

    def end(self, call: LiveCall, result: CallResult) -> None:
        """The call is over; its line stays."""
        self._live.remove(call)
        self._num_ended += 1
        self.say(f"[{self._num_ended:>2}/{self._num_calls}] {_ended(result)}")

    def close(self) -> None:
        """Take the live lines off the screen."""
        self._output.write(self._erased())
        self._output.flush()

    def _erased(self) -> str:
        up = f"\x1b[{self._num_drawn}A\r{_ERASE_BELOW}" if self._num_drawn else ""
        self._num_drawn = 0
        return up

    def _draw(self) -> None:
        if not self._is_terminal or not self._live:
            return
        width = shutil.get_terminal_size().columns - 1
        seconds = time.monotonic() - self._started
        lines = [f"{len(self._live)} in flight, {seconds:.0f} s", *(_live(call) for call in self._live)]
        self._output.write("".join(f"{line[:width]}\n" for line in lines))
        self._num_drawn = len(lines)
        self._drawn_at = time.monotonic()


def _live(call: LiveCall) -> str:
    if call.first_token is None:
        return f"  {call.agent:<8}  reading, {time.monotonic() - call.started:.1f} s"
    return f"  {call.agent:<8}  > {' '.join(call.answer.split())[-60:]}"


def _ended(result: CallResult) -> str:
    head = f"round {result.round}  {result.agent:<8}  "
    if result.error is not None:
        return f"{head}FAILED: {result.error}"
    share = result.cached_tokens / result.prompt_tokens if result.prompt_tokens else 0.0
    first = f"{result.first_token_seconds:.2f} s" if result.first_token_seconds is not None else "-"
    return (
        f"{head}prompt {result.prompt_tokens:>4} ({share:>4.0%} cached)  first token {first:>7}  "
        f"{result.generated_tokens:>2} tokens in {result.seconds:.1f} s"
    )
