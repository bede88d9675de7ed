"""Whether a response is what a run waits for: each call's result, once; or text where there are no calls.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import InvalidField, shorten

from .commands import ToolOutput
from .events import CallAsked


def misfit(calls: Sequence[CallAsked], outputs: Sequence[ToolOutput]) -> InvalidField | None:
    """What is wrong with the results for these calls. A turn that opens behind calls without results is what
    no chat template expects.
    """
    open_calls = dict.fromkeys(call.id for call in calls)
    told = ", ".join(map(shorten, open_calls)) or "it waits for text"
    given: set[str] = set()
    for index, output in enumerate(outputs):
        where = f"outputs[{index}].call_id"
        if output.call_id not in open_calls:
            return InvalidField(where, f"'{where}' is none of the calls that the run waits for: {told}.")
        if output.call_id in given:
            message = f"'{where}' is '{shorten(output.call_id)}' once more: give each result once."
            return InvalidField(where, message)
        given.add(output.call_id)
    missing = ", ".join(shorten(call) for call in open_calls if call not in given)
    if missing:
        message = f"'outputs' lacks results of calls that the run waits for: {missing}. Give all at once."
        return InvalidField("outputs", message)
    return None
