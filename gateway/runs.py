"""Runs: starts them, sends their turns to engines, follows each to its end and writes that end.

Holds no state of a run that the run's stream does not; knows no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from workers.messages import Event, Sampling

from .directory import EngineView


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One call as the HTTP side has checked it. `engine` made the tokens; an equal one may run the turn."""

    engine: EngineView
    token_ids: bytes  # prompt, little-endian uint32
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    tenant: str = ""
    agent: str = ""
    request: bytes = b"\xc0"  # one msgpack value: what a resuming gateway needs to shape the answer
    attached: bool = True  # dies with its client and gateway; False: lives until its own end


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One entry of a run's stream. `id` (`<attempt>-<sequence>`) is what a client resumes from."""

    id: str
    event: Event


class Runs:
    """The runs that this gateway follows."""

    async def start(self, order: Order) -> str:
        """The new run's id (`run-<32 hex>`) once it has a place in line. Raises Overloaded or NoEngine."""
        raise NotImplementedError

    def events(self, run_id: str, after: str | None = None) -> AsyncIterator[RunEvent]:
        """Events from the start, or after an id, to RunEnded inclusive; close it with `aclosing`. Raises
        RunNotFound at the first step.
        """
        raise NotImplementedError

    async def cancel(self, run_id: str) -> None:
        """Ends the run wherever it is; the first end wins. Safe to repeat; raises RunNotFound."""
        raise NotImplementedError

    def is_live(self, run_id: str) -> bool:
        """Whether this gateway follows the run and has not seen its end."""
        raise NotImplementedError
