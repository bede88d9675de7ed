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

MESSAGES_PATH, SHARED_PATH = "/v1/messages", "/v1/models"


def dialect_of(path: str, messages_version: str | None = None) -> Dialect:
    """In whose words an error on this path is told, as long as no answer has begun. `messages_version`: the
    header `anthropic-version`, which tells whose client asks where both ask.
    """
    is_messages = messages_version is not None and path.startswith(SHARED_PATH)
    return MESSAGES if is_messages or path.startswith(MESSAGES_PATH) else CHAT
