"""What the HTTP side may ask of runs, as one type: `Runs` does it, tests may do it otherwise.

All verbs may be repeated with the same `command` id and then answer the same; "" draws a fresh id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from gateway.flow.outlook import Outlook

from .commands import CancelMode, ToolOutput, When
from .outcomes import Alive, Cancelled, Forked, Paused, Responded, Resumed, Steered
from .run import RunEvent
from .spec import ForkPoint, RunSpec
from .state import RunState


class RunVerbs(Protocol):
    """Each verb raises RunNotFound for an unknown run and Conflict where its state does not allow it (409:
    `run_ended`, `no_input_required`, `cannot_continue`). Whose run it is, the caller checks by `state`.
    """

    async def create(self, spec: RunSpec, run_id: str = "") -> str:
        """A detached run's id once it is in line. Raises InvalidField, Overloaded or NoEngine.

        `run_id`: chosen by the caller (`run-<32 hex>`), so that a claim can name it. A run that exists
        already is left as it is.
        """
        ...

    def events(self, run_id: str, after: str = "0-0") -> AsyncIterator[RunEvent]:
        """Events behind an id, up to RunEnded."""
        ...

    async def state(self, run_id: str) -> RunState:
        """The fold over its events. Its spec is `state.spec`, its public state `state.status`."""
        ...

    async def cancel(
        self,
        run_id: str,
        mode: CancelMode = "now",
        *,
        tree: bool = False,
        keep_partial: bool = True,
        command: str = "",
        seconds: float = 0.0,
    ) -> Cancelled:
        """Ends a run; with `tree` all that descends from it, too. Waits for its end for so many seconds.
        `keep_partial`: what it had said is its result; else only its counts are.
        """
        ...

    async def pause(self, run_id: str, hold_seconds: float | None = None, *, command: str = "") -> Paused:
        """Stops it at the next border."""
        ...

    async def resume(self, run_id: str, *, command: str = "") -> Resumed:
        """Goes on with a paused run."""
        ...

    async def steer(self, run_id: str, text: str, when: When = "now", *, command: str = "") -> Steered:
        """Puts a text before the model as the user's."""
        ...

    async def respond(
        self, run_id: str, outputs: Sequence[ToolOutput] = (), text: str = "", *, command: str = ""
    ) -> Responded:
        """Gives a run in input_required what it waits for."""
        ...

    async def fork(self, at: ForkPoint, spec: RunSpec, *, run_id: str = "", command: str = "") -> Forked:
        """A child of the run `at.run`; `spec.body` holds the messages that go on behind the parent's.

        `run_id`: the child's, as in `create`.
        """
        ...

    def outlook(self, run_id: str, state: RunState) -> Outlook:
        """When the answer of a run in that state may begin, and its place in line: as far as this gateway has
        it in hand.
        """
        ...

    async def heartbeat(self, run_id: str) -> Alive:
        """The caller is still there."""
        ...
