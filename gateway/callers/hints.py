"""Who calls and what it tells about its agent: one answer out of the headers and fields of many clients.

Pure. Knows names only: what they mean to a cache or a line is others' business; a hostile one is data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec

from gateway.flow.classes import CLASSES, MAX_PRIORITY, FlowClass, FlowHints
from gateway.http.api import CommonRequest, HintFields
from gateway.http.fields import bad_field
from workers.messages import Retain

MAX_NAME_CHARS = 128
"""A longer name keeps its head and a digest of the whole, so that two of them stay two."""

MAX_METADATA_CHARS = 16_384
RETAINS: tuple[str, ...] = get_args(Retain)
_SESSION_IN_USER = re.compile(r"_session_([0-9a-fA-F-]{36})$")


@dataclass(frozen=True, slots=True)
class Names:
    """Where a call belongs. "" is not told: lineage.py then infers session and agent, never a parent."""

    session: str = ""
    agent: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Hints:
    """All that a caller told about its agent; the words are those of Submit."""

    names: Names = Names()
    fork_tokens: int = 0
    expects: str = ""
    is_final: bool = False
    retain: Retain = "session"
    explain: bool = False
    flow_class: FlowClass | None = None  # None: not told, so what the caller's token says
    priority: int = 0
    expected_output_tokens: int | None = None  # None: not told
    is_unattended: bool = False


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: `tenant` sees no runs of another, and shares prefixes with those of the same `namespace`."""

    tenant: str = ""
    hints: Hints = NO_HINTS
    namespace: str = ""  # as in Submit
    flow_class: FlowClass = "default"  # of calls that name none

    @property
    def scope(self) -> bytes:
        """What turns under these names produced is spliced into prompts under the same names only."""
        names = self.hints.names
        told = "\0".join((self.tenant, names.session, names.agent))
        return hashlib.blake2b(told.encode(errors="replace"), digest_size=8).digest()

    @property
    def flow(self) -> FlowHints:
        """The call's place in line."""
        return FlowHints(
            flow_class=self.hints.flow_class or self.flow_class,
            priority=self.hints.priority,
            expected_output_tokens=self.hints.expected_output_tokens,
        )


def read_hints(headers: Mapping[str, str], request: CommonRequest) -> Hints:
    """Our own headers win over the body's `tetrarch`, that over what other clients send (`SOURCES`).

    The first source with a session gives the session, the first with an agent gives agent and parent.
    Raises InvalidField for an unusable value of ours; foreign ones are cleaned instead.
    """
    told = request.tetrarch or HintFields()
    sources = [_our_names(headers, told), *(source(headers, request) for source in SOURCES)]
    session = next((names.session for names in sources if names.session), "")
    named = next((names for names in sources if names.agent), Names())
    return Hints(
        names=Names(session, named.agent, sources[0].parent or named.parent),
        fork_tokens=_whole_number(headers, "X-Tetrarch-Fork", told.fork_tokens or 0),
        expects=_name(headers, "X-Tetrarch-Expects", "tetrarch.expects", told.expects),
        is_final=_is_final(headers, told),
        is_unattended=_is_told(headers, "X-Tetrarch-Unattended", told=told.unattended) or False,
        retain=_retain(headers, told.retain),
        explain=bool(told.explain),
        flow_class=_class(headers, told.flow_class),
        priority=_priority(headers, told.priority or 0),
        expected_output_tokens=_expected_output(headers, told.expected_output_tokens),
    )


def _our_names(headers: Mapping[str, str], told: HintFields) -> Names:
    return Names(
        _name(headers, "X-Tetrarch-Session", "tetrarch.session", told.session),
        _name(headers, "X-Tetrarch-Agent", "tetrarch.agent", told.agent),
        _name(headers, "X-Tetrarch-Parent", "tetrarch.parent", told.parent),
    )


def _claude_code(headers: Mapping[str, str], request: CommonRequest) -> Names:
    return Names(
        clean(headers.get("X-Claude-Code-Session-Id")),
        clean(headers.get("x-claude-code-agent-id")),
        clean(headers.get("x-claude-code-parent-agent-id")),
    )


def _codex(headers: Mapping[str, str], request: CommonRequest) -> Names:
    """Its threads are agents; the JSON header holds the same ids where the plain ones are missing."""
    metadata = _object(headers.get("x-codex-turn-metadata"))
    thread = headers.get("thread-id") or metadata.get("thread_id") or metadata.get("agent_name")
    parent = headers.get("x-codex-parent-thread-id") or metadata.get("parent_thread_id")
    session = headers.get("session-id") or metadata.get("session_id")
    return Names(clean(session), clean(thread), clean(parent))


def _opencode(headers: Mapping[str, str], request: CommonRequest) -> Names:
    """A sub-agent is a session of its own there, so what it calls a session is our agent."""
    agent = clean(headers.get("x-session-id") or headers.get("x-session-affinity"))
    return Names("", agent, clean(headers.get("x-parent-session-id")))


def _plain_agent(headers: Mapping[str, str], request: CommonRequest) -> Names:
    return Names("", clean(headers.get("X-Agent")))


def _body(headers: Mapping[str, str], request: CommonRequest) -> Names:
    """One key or user may stand for many agents: a session at most. opencode's key is its agent again."""
    key = clean(request.prompt_cache_key)
    if key and key == _opencode(headers, request).agent:
        return Names()
    user = (request.metadata or {}).get("user_id")
    found = _SESSION_IN_USER.search(user) if isinstance(user, str) else None
    return Names(key or (found[1] if found else "") or clean(request.user))


SOURCES: tuple[Callable[[Mapping[str, str], CommonRequest], Names], ...] = (
    _claude_code,
    _codex,
    _opencode,
    _plain_agent,
    _body,
)
"""Other clients' ways, the surest first. What each sends: reference/gateway.md 2.1."""


def _name(headers: Mapping[str, str], header: str, field: str, told: str | None) -> str:
    for where, value in ((header, headers.get(header)), (field, told)):
        if value:
            if not value.isprintable():
                raise bad_field(where, value, remedy="text without control characters")
            return _capped(value.strip())
    return ""


def clean(value: Any) -> str:
    """A name as calls carry it: printable, without outer blanks, capped; "" for what is no text."""
    if not isinstance(value, str):
        return ""
    kept = "".join(_printable(value[:MAX_METADATA_CHARS])).strip()
    return _capped(kept)


def _printable(text: str) -> Iterator[str]:
    return (character for character in text if character.isprintable())


def _capped(name: str) -> str:
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = hashlib.blake2b(name.encode(errors="replace"), digest_size=8).hexdigest()
    return f"{name[: MAX_NAME_CHARS - len(digest) - 1]}-{digest}"


def _object(text: str | None) -> dict[str, Any]:
    if not text or len(text) > MAX_METADATA_CHARS:
        return {}
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _whole_number(headers: Mapping[str, str], header: str, told: int) -> int:
    text = headers.get(header)
    if not text:
        return told
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise bad_field(header, text, remedy="a whole number of tokens from 0")
    return int(text)


def _is_final(headers: Mapping[str, str], told: HintFields) -> bool:
    is_told = _is_told(headers, "X-Tetrarch-Final", told=told.final)
    if is_told is not None:
        return is_told
    return headers.get("x-dynamo-session-final", "").strip().lower() in ("true", "1")


def _is_told(headers: Mapping[str, str], header: str, *, told: bool | None) -> bool | None:
    text = headers.get(header, "").strip().lower()
    if text in ("true", "1", "false", "0"):
        return text in ("true", "1")
    if text:
        raise bad_field(header, text, remedy="'true' or 'false'")
    return told


def _retain(headers: Mapping[str, str], told: Retain | None) -> Retain:
    text = headers.get("X-Tetrarch-Retain", "").strip().lower()
    if text and text not in RETAINS:
        raise bad_field("X-Tetrarch-Retain", text, remedy=" or ".join(f"'{name}'" for name in RETAINS))
    return cast(Retain, text) if text else told or "session"


def _class(headers: Mapping[str, str], told: FlowClass | None) -> FlowClass | None:
    """X-SMG-Priority is another router's header for the same names; its highest is not ours."""
    text = headers.get("X-Tetrarch-Class", "").strip().lower()
    if text and text not in CLASSES:
        raise bad_field("X-Tetrarch-Class", text, remedy=" or ".join(f"'{name}'" for name in CLASSES))
    foreign = headers.get("X-SMG-Priority", "").strip().lower()
    return _class_named(text) or told or _class_named("interactive" if foreign == "system" else foreign)


def _class_named(text: str) -> FlowClass | None:
    return next((name for name in CLASSES if name == text), None)


def _priority(headers: Mapping[str, str], told: int) -> int:
    text = headers.get("X-Tetrarch-Priority", "").strip()
    if not text:
        return told
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text) or abs(int(text)) > MAX_PRIORITY:
        raise bad_field(
            "X-Tetrarch-Priority", text, remedy=f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    return int(text)


def _expected_output(headers: Mapping[str, str], told: int | None) -> int | None:
    if not headers.get("X-Tetrarch-Expected-Output"):
        return told
    number = _whole_number(headers, "X-Tetrarch-Expected-Output", 0)
    if number < 1:
        raise bad_field("X-Tetrarch-Expected-Output", number, remedy="a whole number of tokens from 1")
    return number
