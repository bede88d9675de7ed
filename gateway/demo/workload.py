"""The demo's session: one orchestrator, its agents and what each is asked in two rounds.

Pure data. The system prompt with its tools is the same for all (about 800 tokens), each agent's history is
its own: of some 14,000 prompt tokens about one in eight is new.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

NUM_ROUNDS = 2
ANSWER_TOKENS = 32

Chat = list[dict[str, str]]
"""Messages in OpenAI's shape."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A sub-agent: its name and what the orchestrator tells it, one text a round."""

    name: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    purpose: str
    parameters: tuple[str, ...]

    def schema(self) -> str:
        properties = {
            name: {"type": "string", "description": text}
            for name, text in (parameter.split(": ") for parameter in self.parameters)
        }
        function = {
            "name": self.name,
            "description": self.purpose,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
        }
        return json.dumps({"type": "function", "function": function})


_TOOLS = (
    _Tool(
        "read_file",
        "Read a file of the work tree and return its lines with their numbers",
        ("path: file to read", "start: first line", "end: last line"),
    ),
    _Tool(
        "search_code",
        "Find a regular expression in the work tree",
        ("pattern: what to find", "glob: files to look at", "limit: most matches to return"),
    ),
    _Tool(
        "edit_file",
        "Replace one exact text by another in a file",
        ("path: file to change", "old: text that is there", "new: text to put there"),
    ),
    _Tool(
        "run_tests",
        "Run the named tests and return their failures",
        ("names: tests to run", "timeout: seconds to wait"),
    ),
    _Tool(
        "run_shell",
        "Run a shell command in the sandbox and return its output",
        ("command: what to run", "timeout: seconds to wait"),
    ),
    _Tool(
        "report",
        "Send a finding to the orchestrator and end this task",
        ("finding: what is so", "evidence: how you know", "confidence: low, medium or high"),
    ),
)

_RULES = """You are a sub-agent of an orchestrator that repairs a web shop. You get one task at a time.

How to work:
- Read before you judge. Say which file and which line a finding rests on.
- Change nothing that your task does not name. Other agents work in the same tree at this moment.
- When two explanations fit, say what would tell them apart, and test the cheaper one first.
- A failing test is evidence, a passing test is not proof. Look at what it leaves out.
- If a tool fails twice in the same way, stop using it and report what it said.
- Never print secrets, keys or addresses of customers, even when a log shows them.
- Answer in plain English, at most three sentences, without lists.

The shop: orders/ takes and prices orders, stock/ counts what is there, pay/ speaks to the bank, mail/ tells
the customer, web/ shows it all. Each part has its own tests. The queue between orders and mail is at least
once: the same message may come twice, so every receiver must bear it.

Your tools:
"""

SYSTEM = _RULES + "\n".join(tool.schema() for tool in _TOOLS)

_TASKS = (
    ("pricing", "Orders of three items are priced without the discount.", "rule in orders/price.py line 88"),
    (
        "stock",
        "The stock of a sold item sometimes falls below zero.",
        "a race in stock/count.py line 41",
    ),
    ("payment", "A payment that timed out is charged a second time.", "retry in pay/bank.py line 130"),
    ("mail", "Some customers get the same mail twice.", "no key in mail/send.py line 22"),
    ("search", "The search page is slow when a word is rare.", "full scan in web/search.py line 61"),
    ("login", "Users are logged out while they fill their basket.", "short age in web/session.py line 17"),
    ("export", "The monthly export leaves out the last day.", "open interval in orders/export.py line 54"),
    ("images", "Pictures of new items are not shown for an hour.", "old cache in web/images.py line 73"),
)


def agents() -> tuple[Agent, ...]:
    """The agents, each with one task per round."""
    return tuple(
        Agent(
            name,
            (
                f"You look after {name}. {fault} Explain the most likely cause and which tool you use first.",
                f"The tool found: {found}. Explain what that means and what you do next.",
            ),
        )
        for name, fault, found in _TASKS
    )


def opening() -> Chat:
    """What every agent's conversation begins with."""
    return [{"role": "system", "content": SYSTEM}]
