"""What a caller demands of an answer's shape, and the words around it that a model adds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from gateway.text.parsing import CallFormat, call_format

from .schemas import Checked, Schema

ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class WantedTool:
    """A tool that may be called. Not `is_strict`: what of its schema cannot be enforced is the model's."""

    name: str
    schema: Checked = field(default_factory=lambda: Checked(ANY_OBJECT))
    is_strict: bool = False
    path: str = "tools"  # of its schema in the body

    @property
    def loosened(self) -> WantedTool:
        """The same with any object as its arguments."""
        return replace(self, schema=Checked(ANY_OBJECT))


@dataclass(frozen=True, slots=True)
class Wants:
    """What the answer must be. Its content: `answer` by its schema; None: any text."""

    answer: Checked | None = None
    answer_path: str = "response_format"
    tools: tuple[WantedTool, ...] = ()
    must_call: bool = False
    is_parallel: bool = True  # more than one call at a time

    @property
    def is_free(self) -> bool:
        """Nothing has to be enforced."""
        return self.answer is None and not self.must_call and not any(tool.is_strict for tool in self.tools)


@dataclass(frozen=True, slots=True)
class Thought:
    """How the model thinks. open: the prompt ends in a thought; possible: the answer may begin with one."""

    state: Literal["none", "open", "possible"] = "none"
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes its calls."""

    format: CallFormat = "tagged"
    names_first: bool = False  # Mistral's newer way: `name[ARGS]{...}` in place of a list
    has_call_ids: bool = False  # of these: `name[CALL_ID]id[ARGS]{...}`

    @classmethod
    def of(cls, chat_template: str) -> CallForm:
        """As the template shows it."""
        return cls(call_format(chat_template), "[ARGS]" in chat_template, "[CALL_ID]" in chat_template)
