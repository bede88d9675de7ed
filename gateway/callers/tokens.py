"""Access tokens: 256 random bits each, of which only the SHA-256 is kept, in a file for its owner only.

Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec

from gateway.errors import GatewayError
from gateway.flow.classes import CLASSES, FlowClass

from .scopes import LOCAL, SCOPES, USUAL_SCOPES, Scope

PREFIX = "tet-"
"""Lets secret scanners and people recognise a token."""


CallsPerMinute = Annotated[int, msgspec.Meta(ge=0)]


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the holder of a token may do. The defaults are those of tokens made before there was a choice."""

    scopes: tuple[Scope, ...] = USUAL_SCOPES
    group: str = ""  # tokens of one group share runs and prefixes; "": the token's name is its group
    calls_per_minute: Annotated[int, msgspec.Meta(ge=0)] | None = (
        None  # None: as the gateway's settings say; 0: any number
    )
    flow_class: FlowClass = "default"  # of calls that name none


class Token(Grant, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of a token."""

    name: str
    created: int  # unix seconds
    sha256: str  # hex

    @property
    def tenant(self) -> str:
        """Whose runs its calls are."""
        return self.group or self.name


NO_GRANT = Grant()


class TokenError(GatewayError):
    """The token file cannot be read, or a name is taken, unknown or unusable."""

    def __init__(self, message: str) -> None:
        super().__init__("internal_error", message)


class TokenStore:
    """The tokens in one file. Another process may add and revoke: the file is read again when it changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._tokens: list[Token] = []

    def add(self, name: str, grant: Grant = NO_GRANT) -> str:
        """A new token, told only here. Raises TokenError for a taken or unusable name or group."""
        _check_name("name", name)
        if grant.group:
            _check_name("group", grant.group)
        tokens = self.tokens()
        if any(token.name == name for token in tokens):
            raise TokenError(f"There is a token named '{name}' already: revoke it or choose another name.")
        if not grant.group and any(token.group == name for token in tokens):
            raise TokenError(
                f"There is a group named '{name}', whose runs this token would see: say so with --group, "
                "or choose another name."
            )
        secret = PREFIX + secrets.token_urlsafe(32)
        given = msgspec.structs.asdict(grant)
        token = Token(name=name, created=int(time.time()), sha256=_sha256(secret), **given)
        self._write([*tokens, token])
        return secret

    def revoke(self, name: str) -> None:
        """The token stops working at once. Raises TokenError for an unknown name."""
        tokens = self.tokens()
        kept = [token for token in tokens if token.name != name]
        if len(kept) == len(tokens):
            raise TokenError(f"There is no token named '{name}'.")
        self._write(kept)

    def tokens(self) -> list[Token]:
        """All tokens, oldest first. Raises TokenError for an unreadable file."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._seen, self._tokens = None, []
            return []
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._seen:
            try:
                self._tokens = msgspec.json.decode(self._path.read_bytes(), type=list[Token])
            except (OSError, msgspec.DecodeError) as error:
                raise TokenError(f"The token file {self._path} cannot be read: {error}") from None
            self._seen = seen
        return list(self._tokens)

    def find(self, secret: str) -> Token | None:
        """The token with this secret. Takes as long for a wrong one as for a right one."""
        digest = _sha256(secret)
        found = None
        for token in self.tokens():
            if hmac.compare_digest(token.sha256.encode(), digest.encode()):
                found = token
        return found

    def _write(self, tokens: list[Token]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp makes the file 0600 whatever the umask; the rename keeps that and is atomic.
        descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".tokens-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(tokens), indent=2))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._seen = None


def grant_of(scopes: str | None, group: str, calls_per_minute: int | None, flow_class: str) -> Grant:
    """A grant as typed: scopes between commas, None for what tokens usually have. Raises TokenError."""
    given = [scope.strip() for scope in (",".join(USUAL_SCOPES) if scopes is None else scopes).split(",")]
    for scope in given:
        if scope not in SCOPES:
            raise TokenError(f"There is no scope '{scope}': choose from {', '.join(SCOPES)}.")
    if flow_class not in CLASSES:
        raise TokenError(f"There is no class '{flow_class}': choose from {', '.join(CLASSES)}.")
    if calls_per_minute is not None and calls_per_minute < 0:
        raise TokenError(
            f"A token cannot make {calls_per_minute} calls per minute: give 0 (any number) or more."
        )
    return Grant(
        scopes=tuple(scope for scope in SCOPES if scope in given),
        group=group,
        calls_per_minute=calls_per_minute,
        flow_class=flow_class,
    )


def told(token: Token) -> str:
    """A line about a token, without its secret."""
    limit = token.calls_per_minute
    parts = [token.name, f"scopes={','.join(token.scopes)}"]
    parts += [f"group={token.group}"] if token.group else []
    parts += [f"calls-per-minute={limit or 'any'}"] if limit is not None else []
    parts += [f"class={token.flow_class}"] if token.flow_class != "default" else []
    return "  ".join(parts)


def _check_name(what: str, name: str) -> None:
    if not name or len(name) > 64 or not name.isprintable():
        raise TokenError(f"A token's {what} must have 1 to 64 printable characters.")
    if name == LOCAL:  # an admin could not name such a tenant
        raise TokenError(
            f"A token's {what} cannot be '{LOCAL}', which stands for calls without a token: choose another."
        )


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
