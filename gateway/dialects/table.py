"""The client APIs that this server speaks."""

from __future__ import annotations

from .answer import Endpoint
from .frames import Dialect
from .messages.errors import messages_error
from .messages.teller import MessagesTeller
from .openai import ChatTeller, TextTeller, openai_error
from .responses.teller import ResponsesTeller

CHAT = Dialect(ChatTeller, openai_error)
TEXT = Dialect(TextTeller, openai_error)
RESPONSES = Dialect(ResponsesTeller, openai_error)
MESSAGES = Dialect(MessagesTeller, messages_error)

DIALECTS: dict[Endpoint, Dialect] = {"chat": CHAT, "text": TEXT, "responses": RESPONSES, "messages": MESSAGES}

ERRORS_BY_PATH: tuple[tuple[str, Dialect], ...] = (("/v1/messages", MESSAGES),)
"""Paths whose errors are not worded as OpenAI's; the first prefix that fits."""


def dialect_of(path: str) -> Dialect:
    """In whose words an error on this path is told, as long as no answer has begun."""
    return next((dialect for prefix, dialect in ERRORS_BY_PATH if path.startswith(prefix)), CHAT)
