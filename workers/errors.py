"""What can go wrong in an engine, as a small tree: who raises picks the kind, who reports reads it."""

from __future__ import annotations


class WorkersError(Exception):
    """Base of this room's errors. The message says what is wrong and what to do about it."""


class SettingsError(WorkersError):
    """A setting is unknown, has a wrong value, or asks for what this machine cannot do."""


class ModelError(WorkersError):
    """The model cannot be loaded: a broken folder, a missing or truncated file, an unusable tokenizer."""


class UnsupportedModel(ModelError):
    """The model's type, or a feature that it needs, is not implemented here."""


class DoesNotFit(ModelError):
    """Weights and pages need more memory than there is; the message says the sum and what would fit."""


class BusError(WorkersError):
    """The bus cannot be reached or is not fit for use."""


class EngineIdInUse(BusError):
    """Another process has this engine's name on the bus: one of the two needs another."""


class IntegrityError(WorkersError):
    """The engine's own account does not add up; the message names the turn and the two figures."""


class TurnRefused(WorkersError):
    """A turn cannot be accepted. kind: the reason (a metric label); retryable: another try may work."""

    def __init__(self, kind: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable


class DeadEnd(WorkersError):
    """A turn's grammar allows no next token; the message holds nothing of the turn's text."""


class TraceError(WorkersError):
    """A trace file cannot be read or holds no usable call; the message names the line."""
