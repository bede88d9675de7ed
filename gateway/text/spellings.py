"""Other spellings of a conversation, for templates that refuse the first. Nothing is moved. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]

REMINDER = "<system-reminder>\n{}\n</system-reminder>"
LATE_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "probe one"},
    {"role": "system", "content": "probe two"},
    {"role": "assistant", "content": "probe three"},
    {"role": "user", "content": "probe four"},
)


def is_system(message: Message) -> bool:
    """Whether it is the system's or the developer's."""
    return message["role"] in ("system", "developer")


def takes_late_system(render: Callable[[Sequence[Message]], str | None]) -> bool:
    """Whether a template writes system text in the middle of a conversation where it stands. `render`: None
    for what it refuses.
    """
    text = render(LATE_PROBE)
    if text is None:
        return False
    places = [text.find(str(message["content"])) for message in LATE_PROBE]
    return -1 not in places and places == sorted(places)


def with_reminders(messages: Sequence[Message]) -> list[Message]:
    """System text behind the first message of another role as a reminder at the end of the message before it,
    in one of the user's where that is the assistant's.
    """
    spelled: list[Message] = []
    is_late = False
    for message in messages:
        is_late = is_late or not is_system(message)
        if not (is_late and is_system(message)):
            spelled.append(message)
            continue
        text = REMINDER.format(str(message.get("content") or "").strip())
        last = spelled[-1]
        if last["role"] in ("user", "tool") and isinstance(last.get("content"), str):
            spelled[-1] = {**last, "content": f"{last['content']}\n{text}"}
        else:
            spelled.append({"role": "user", "content": text})
    return spelled


def with_empty_contents(messages: Sequence[Message]) -> list[Message] | None:
    """The content "" where an assistant only calls tools; None where no message is such."""
    is_bare = [
        message["role"] == "assistant" and bool(message.get("tool_calls")) and "content" not in message
        for message in messages
    ]
    if not any(is_bare):
        return None
    return [
        {**message, "content": ""} if bare else message
        for message, bare in zip(messages, is_bare, strict=True)
    ]
