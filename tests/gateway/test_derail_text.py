"""Text that goes round is found wherever it is cut, and text that only looks alike is left alone."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.derail.rules import DerailRules
from gateway.derail.text_loops import TextLoop, TextLoops

RULES = DerailRules()
NUMBERS = ("ten", "nine", "eight", "seven", "six", "five", "four", "three", "two", "one", "no")


def loops(*pieces: str, rules: DerailRules = RULES) -> list[TextLoop]:
    """What is found in a text that comes in these pieces."""
    looking = TextLoops(rules)
    found = [loop for piece in pieces for loop in looking.feed(piece)]
    return [*found, *looking.end()]


def counted(copies: int) -> str:
    """A loop that no token cycle is: each time another number."""
    return "".join(
        f"Let me look at the file once more to see where the error comes from, this is attempt {number}.\n"
        for number in range(copies)
    )


def prose(num_words: int, seed: int) -> str:
    """Words that are drawn anew each time."""
    words = [
        "sea",
        "wind",
        "sail",
        "moor",
        "heather",
        "stone",
        "river",
        "light",
        "dawn",
        "hill",
        "the",
        "and",
    ]
    return " ".join(random.Random(seed).choices(words, k=num_words))


TABLE = "\n".join(
    f"| item {number} | the same long description in every row of this table | yes |" for number in range(60)
)
CODE = (
    "```python\n"
    + "    result.append(convert(value, kind, remedies=REMEDIES, hidden=HIDDEN))\n" * 60
    + "```\n"
)
BARE_CODE = "    result.append(convert(value, kind, remedies=REMEDIES, hidden=HIDDEN))\n" * 60
LOG = "".join(
    f"2026-11-30 04:{number:02}:07 INFO gateway the caretaker has looked at all of the live runs\n"
    for number in range(60)
)
SYSTEM_LOG = "".join(
    f"Nov 30 04:{number:02}:07 host sshd: Failed password for invalid user admin from the network again\n"
    for number in range(60)
)
LIST = "".join(
    f"{number}. Open the settings, choose the network page there and enter the name of the server.\n"
    for number in range(60)
)
BULLETS = "- Open the settings, choose the network page there and enter the name of the server.\n" * 60
JSON = (
    '[{"name": "a", "type": "string", "description": "the same words again and again", "required": true},\n'
    * 60
)
PRETTY_JSON = '{\n  "type": "string",\n  "description": "the same words again",\n  "x": 1\n},\n' * 60
BOTTLES = "".join(
    f"{now.title()} green bottles hanging on the wall,\n" * 2
    + "And if one green bottle should accidentally fall,\n"
    + f"There'll be {then} green bottles hanging on the wall.\n\n"
    for now, then in [*pairwise(NUMBERS)] * 2
)
REFRAIN = "\n".join(
    f"{verse}\nOh bring me back again, my love, over the sea to the shore where I was born.\n"
    for verse in (prose(90, seed) for seed in range(15))
)
TUTORIAL = "".join(
    "Then run this command in the terminal and wait until it has ended:\n\n"
    f"```sh\nmake step-{number}\n```\n\n{prose(30, number)}\n"
    for number in range(30)
)
HARMLESS = {
    "table": TABLE,
    "code": CODE,
    "bare code": BARE_CODE,
    "log": LOG,
    "system's log": SYSTEM_LOG,
    "list": LIST,
    "bullets": BULLETS,
    "json": JSON,
    "pretty json": PRETTY_JSON,
    "ten green bottles": BOTTLES,
    "refrain": REFRAIN,
    "tutorial": TUTORIAL,
}


def test_a_loop_whose_counter_grows_is_a_warning_first_and_then_critical() -> None:
    found = loops(counted(40))
    assert [loop.severity for loop in found] == ["warning", "critical"]
    assert found[0].start < 100 and found[0].excerpt in counted(1)


@pytest.mark.parametrize(
    "sentence",
    [
        "I should check this again, for I am not yet sure about it. ",
        "我应该再检查一遍这个文件，因为我还不确定错误到底出在哪里，所以现在再看一次，然后再决定怎么办才好。",
    ],
)
def test_a_loop_without_line_breaks_is_found(sentence: str) -> None:
    assert loops(sentence * 30)


def test_a_loop_begins_where_the_text_before_it_ends() -> None:
    before = "Here is something that was said only once before all of this went wrong, it did.\n" + "\n"
    found = loops(before + counted(12))
    assert len(before) - 1 <= found[0].start < len(before) + 100


def test_text_that_is_repeated_less_often_is_none() -> None:
    assert loops(counted(RULES.warn_chunks - 1)) == []


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS.keys())
def test_text_that_may_look_alike_gives_no_false_alarm(text: str) -> None:
    assert loops(text) == []


def test_a_loop_behind_code_is_found() -> None:
    assert loops(CODE + counted(12))


PIECES = st.sampled_from(
    [
        "\n",
        "```\n",
        " ",
        "| a | b |\n",
        "- point\n",
        counted(3),
        CODE[:200],
        "x" * 300,
        "word " * 50,
        "{",
        "  ",
    ]
)


@given(st.lists(PIECES, max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_found_is_the_same_at_every_split(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces) + counted(data.draw(st.integers(0, 25)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=40)))
    split = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    rules = DerailRules(warn_chunks=3, critical_chunks=6)
    assert loops(*split, rules=rules) == loops(text, rules=rules) == loops(*text, rules=rules)


def test_memory_is_bounded_and_time_grows_with_the_new_text_only() -> None:
    words = random.Random(1)
    text = "".join(f"{''.join(words.choices('abcdefgh', k=words.randint(2, 9)))} " for _ in range(40_000))
    looking, seconds = TextLoops(RULES), []
    for start in range(0, len(text), 20_000):
        before = time.process_time()
        for at in range(start, start + 20_000, 4):
            looking.feed(text[at : at + 4])
        seconds.append(time.process_time() - before)
        assert len(looking._seen) <= len(looking._order) <= RULES.chunk_distance + 1
        assert len(looking._begun) + len(looking._recent) < 300
    assert max(seconds[1:]) < 4 * min(seconds[:-1]) + 0.05
    assert sum(seconds) / len(text) < 20e-6  # a character; measured: 1.1e-6
