"""What the scripted model says, as data: found by a mark in the prompt, stepped by the tool results in it.

Knows prompts as text, no tokens and no client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RESULT = "<tool_response>\n"
"""Opens each tool result in the prompts of `TEMPLATE`."""

TOOLS = "<tools>\n"
"""Opens the list of tools; a prompt without it asks for words only: a title, a summary."""

TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{%- if tools %}
{{- 'Call tools as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>. They are:\\n<tools>\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'tool' %}{{ '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ message.content or '' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
{{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


TAKEN = "TAKEN"
"""In a call's arguments: what its `take` found in the conversation, such as the id of an agent."""


@dataclass(frozen=True, slots=True)
class Call:
    """A step that calls a tool of the client's. `take`: a pattern with one group; its last match is used."""

    name: str
    arguments: dict[str, Any]
    take: str = ""

    def said(self, prompt: str) -> str:
        """As the model writes it."""
        arguments = json.dumps(self.arguments)
        if self.take:
            found = re.findall(self.take, prompt)
            arguments = arguments.replace(TAKEN, found[-1] if found else "nothing was found")
        return f'<tool_call>\n{{"name": {json.dumps(self.name)}, "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Script:
    """What is said in conversations that hold `mark`: a step after each tool result, the last again."""

    mark: str
    steps: tuple[Call | str, ...]


def answer(scripts: Sequence[Script], prompt: str) -> str:
    """The first script whose mark is there speaks: a parent's, which tells its children's, stands before."""
    if TOOLS not in prompt:
        return "A small task"
    script = next((script for script in scripts if script.mark in prompt), None)
    if script is None:
        return "There is no script for this conversation."
    step = script.steps[min(prompt.count(RESULT), len(script.steps) - 1)]
    return step if isinstance(step, str) else step.said(prompt)


DONE = "The file is there."
ALONE = "make a file, in task one of"
"""What an agent does itself."""
TEAM = "have a file made, in task two of"
"""What it has another agent do."""
PART = "make the helper's file of"
"""What the other agent is told."""

CODEX = (
    Script(f"{ALONE} Codex", (Call("exec_command", {"cmd": "printf 'by Codex' > made.txt"}), DONE)),
    Script(
        f"{TEAM} Codex",
        (
            Call("multi_agent_v1.spawn_agent", {"message": f"Please {PART} Codex."}),
            Call(
                "multi_agent_v1.wait_agent",
                {"targets": [TAKEN], "timeout_ms": 30_000},
                take=r'"agent_id": ?"([0-9a-f-]{36})"',
            ),
            DONE,
        ),
    ),
    Script(f"{PART} Codex", (Call("exec_command", {"cmd": "printf 'by its helper' > helped.txt"}), DONE)),
)

OPENCODE = (
    Script(f"{ALONE} opencode", (Call("write", {"filePath": "made.txt", "content": "by opencode"}), DONE)),
    Script(
        f"{TEAM} opencode",
        (
            Call(
                "task",
                {
                    "description": "Make a file",
                    "prompt": f"Please {PART} opencode.",
                    "subagent_type": "general",
                },
            ),
            DONE,
        ),
    ),
    Script(
        f"{PART} opencode",
        (Call("write", {"filePath": "helped.txt", "content": "by its helper"}), DONE),
    ),
)

WAIT_FOR_FILE = "for turn in $(seq 100); do test -f helped.txt && break; sleep 0.2; done; sleep 1"
"""Hermes' helpers run in the background and end with it."""

HERMES = (
    Script(f"{ALONE} Hermes", (Call("write_file", {"path": "made.txt", "content": "by Hermes"}), DONE)),
    Script(
        f"{TEAM} Hermes",
        (
            Call("delegate_task", {"goal": f"Please {PART} Hermes.", "context": "There is none."}),
            Call("terminal", {"command": WAIT_FOR_FILE}),
            DONE,
        ),
    ),
    Script(f"{PART} Hermes", (Call("write_file", {"path": "helped.txt", "content": "by its helper"}), DONE)),
)

CLAUDE_CODE = (
    Script(
        f"{ALONE} Claude Code",
        (Call("Write", {"file_path": "made.txt", "content": "by Claude Code"}), DONE),
    ),
    Script(
        f"{TEAM} Claude Code",
        (
            Call(
                "Agent",
                {
                    "description": "Make a file",
                    "prompt": f"Please {PART} Claude Code.",
                    "subagent_type": "general-purpose",
                    "run_in_background": False,
                },
            ),
            DONE,
        ),
    ),
    Script(
        f"{PART} Claude Code",
        (Call("Write", {"file_path": "helped.txt", "content": "by its helper"}), DONE),
    ),
)

SCRIPTS = (*CODEX, *OPENCODE, *HERMES, *CLAUDE_CODE)
