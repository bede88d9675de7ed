"""An async client for orchestrators: starts runs, follows them over broken connections, steers and waits.

    import asyncio
    from gateway.client import Budget, Client, TokenText

    async def main() -> None:
        async with Client() as client:  # http://127.0.0.1:8114, where `tetrarch serve` listens
            plan = await client.spawn("Plan how to sort a bookshelf.", session="shelf", agent="planner")
            async with plan.stream() as events:
                async for event in events:
                    if isinstance(event, TokenText):
                        print(event.text, end="", flush=True)

            # Four that go on from the plan, without computing it again, each with a budget.
            forks = [
                await plan.fork(input=f"Do step {n}.", agent=f"worker-{n}", budget=Budget(output_tokens=500))
                for n in range(4)
            ]
            first = await client.wait(forks, "any", seconds=60)
            print(first.done[0].result)
            for run in forks:
                await run.steer("Be brief.")
            for run in (await client.wait(forks)).done:
                print(run.status, run.usage.total_tokens, run.error, run.derail)

    asyncio.run(main())

A run lives on the server: it goes on when this process ends, and `client.handle(id)` takes it up again.
"""

from gateway.native.bodies import (
    CreatedBody,
    RunBody,
    RunLine,
    RunUsage,
    TreeBody,
    VerbBody,
)
from gateway.native.telling import (
    PublicEvent,
    Thinking,
    TokenText,
    ToolCallBegun,
    ToolCallDelta,
    ToolCallMade,
)

from .budgets import BudgetUse
from .client import URL, Client
from .errors import (
    AccessDenied,
    Busy,
    Conflict,
    InvalidRequest,
    NotFound,
    Refused,
    ServerFault,
    TetrarchError,
    Unreachable,
)
from .fields import Budget, ForkAt, RunFields
from .handle import RunHandle
from .patience import Patience
from .streams import ENDINGS, START, EventStream
from .waiting import Waited

__all__ = [
    "ENDINGS",
    "START",
    "URL",
    "AccessDenied",
    "Budget",
    "BudgetUse",
    "Busy",
    "Client",
    "Conflict",
    "CreatedBody",
    "EventStream",
    "ForkAt",
    "InvalidRequest",
    "NotFound",
    "Patience",
    "PublicEvent",
    "Refused",
    "RunBody",
    "RunFields",
    "RunHandle",
    "RunLine",
    "RunUsage",
    "ServerFault",
    "TetrarchError",
    "Thinking",
    "TokenText",
    "ToolCallBegun",
    "ToolCallDelta",
    "ToolCallMade",
    "TreeBody",
    "Unreachable",
    "VerbBody",
    "Waited",
]
