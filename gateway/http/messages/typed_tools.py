"""Tools that Anthropic's API knows by their type and the client runs: written out as functions for models
that were not trained on them. Their fields are those of Anthropic's public documentation.
"""

from __future__ import annotations

import re
from typing import Any

from .blocks import Block, may

_TYPE = re.compile(r"(bash|text_editor|memory)_(\d{8})")
_UNDO_UNTIL = "20250124"
"""The last version of the editor that undoes, and that inserts `new_str`."""

_TEXT, _FLAG, _WHOLE = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
_RANGE = {"type": "array", "items": _WHOLE}
_EDITS: dict[str, Any] = {
    "path": _TEXT,
    "view_range": _RANGE,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _WHOLE,
}
_TELLS = {
    "bash": "Runs a command in a shell that stays open between calls. 'restart': true starts a new shell.",
    "text_editor": "Shows and edits files: 'view' (a range of lines with 'view_range'), 'create' with "
    "'file_text', 'str_replace' of 'old_str', which must occur once, by 'new_str', 'insert' behind the line "
    "'insert_line'.",
    "memory": "Notes that outlast this conversation, as files below /memories: 'view', 'create' with "
    "'file_text', 'str_replace' of 'old_str' by 'new_str', 'insert' of 'insert_text' behind the line "
    "'insert_line', 'delete', 'rename' of 'old_path' to 'new_path'.",
}


def client_tool(tool: Block, where: str) -> Block | None:
    """A typed tool as one with a schema; None: the client does not run it. Raises InvalidField."""
    found = _TYPE.fullmatch(str(tool.get("type")))
    if found is None:
        return None
    kind, version = found[1], found[2]
    told = may(tool, "description", str, where, "") or _TELLS[kind]
    return {**tool, "type": "custom", "description": told, "input_schema": _schema(kind, version)}


def _schema(kind: str, version: str) -> dict[str, Any]:
    if kind == "bash":
        return {"type": "object", "properties": {"command": _TEXT, "restart": _FLAG}}
    commands, fields = ["view", "create", "str_replace", "insert"], dict(_EDITS)
    if kind == "memory":
        commands += ["delete", "rename"]
        fields |= {"old_path": _TEXT, "new_path": _TEXT}
    if kind == "text_editor" and version <= _UNDO_UNTIL:
        commands.append("undo_edit")
    else:
        fields["insert_text"] = _TEXT
    return {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": commands}, **fields},
        "required": ["command"] if kind == "memory" else ["command", "path"],
    }
