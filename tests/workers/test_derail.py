from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.derail import Cycle, DerailRules, Watch, find_cycle
from workers.messages import Derail

RULES = DerailRules()
SMALL = DerailRules(max_period=6, min_copies=3, min_tokens=8, every_tokens=4)


def tokens(values: Sequence[int]) -> array[int]:
    return array("I", values)


def noise(num_tokens: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(50_000) + index for index in range(num_tokens)]


def naive(generated: Sequence[int], rules: DerailRules) -> Cycle | None:
    for period in range(1, rules.max_period + 1):
        covered = period
        while covered < len(generated) and generated[-1 - covered] == generated[-1 - covered + period]:
            covered += 1
        if covered >= max(rules.min_copies * period, rules.min_tokens) and covered <= len(generated):
            return Cycle(len(generated) - covered, period)
    return None


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(chr(token_id) for token_id in token_ids)


def watched(text: str, rules: DerailRules = RULES) -> list[tuple[int, Derail]]:
    """What is told of a text whose tokens are its characters, and after how many tokens."""
    watch = Watch(rules, text_of)
    generated = tokens([])
    told = []
    for character in text:
        watch.see(character, len(generated))
        generated.append(ord(character))
        found = watch.look(generated)
        if found is not None:
            told.append((len(generated), found))
    return told


@pytest.mark.parametrize("period", [1, 2, 3, 15, 16, 17, 63, 64, 100, 255, 256])
@pytest.mark.parametrize("num_before", [0, 1, 5000])
def test_a_cycle_of_each_period_is_found_where_it_began(period: int, num_before: int) -> None:
    copy, before = noise(period, 1), noise(num_before, 2)
    num_needed = max(4 * period, 64)
    looping = (copy * 64)[:num_needed]
    assert find_cycle(tokens(before + looping), RULES) == Cycle(num_before, period)
    assert find_cycle(tokens(before + looping[:-1]), RULES) is None


@pytest.mark.parametrize("period", [257, 300])
def test_a_longer_period_is_not_looked_for(period: int) -> None:
    assert find_cycle(tokens(noise(period) * 6), RULES) is None


@given(st.lists(st.integers(0, 2), max_size=60))
def test_small_cycles_are_those_that_a_plain_search_finds(values: list[int]) -> None:
    found, expected = find_cycle(tokens(values), SMALL), naive(values, SMALL)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.period == expected.period
        assert found.start == expected.start or len(values) > 22  # what is beyond the window is not looked at


@given(st.integers(0, 5), st.integers(1, 6), st.integers(0, 40), st.integers(0, 1000))
def test_cycles_behind_noise_are_found_with_their_beginning(
    num_noise: int, period: int, num_more: int, seed: int
) -> None:
    copy = noise(period, seed)
    values = noise(num_noise, seed + 1) + (copy * 60)[: 3 * period + num_more]
    assert find_cycle(tokens(values[-22:]), SMALL) == naive(values[-22:], SMALL)


FALSE_ALARMS = {
    "a line of 60 dashes": "-" * 60 + "\n",
    "a rule in a table": "| name | value |\n|" + "-" * 30 + "|" + "-" * 30 + "|\n",
    "rows that differ in a number": "".join(
        f'{{"id": {n}, "name": "item", "tags": []}},\n' for n in range(90)
    ),
    "indentation": "".join(f"{' ' * 16}value_{n} = {n}\n" for n in range(60)),
    "deep indentation": "\n".join(" " * (4 * depth) + f"if a{depth}:" for depth in range(15)),
    "a table": "".join(f"| {n:04d} | {n * n:08d} |\n" for n in range(200)),
    "three copies": "the same paragraph, as a refrain would be sung in a song. " * 3,
    "counting": " ".join(str(n) for n in range(1000)),
    "closed calls": '<tool_call>{"name": "ls"}</tool_call>\n'.join(str(n) for n in range(30)),
    "many closed calls of one family": "".join(f'[TOOL_CALLS]read[ARGS]{{"n": {n}}}' for n in range(30)),
    "nine open calls": "".join(f"<tool_call>{n}" for n in range(9)),
    "marks in two kinds": "".join(f"<tool_call><function=f{n}>{n}</function></tool_call>" for n in range(30)),
}


@pytest.mark.parametrize("text", FALSE_ALARMS.values(), ids=FALSE_ALARMS)
def test_no_alarm(text: str) -> None:
    assert watched("Here it is:\n" + text + "\nand so on.") == []


def test_a_cycle_is_told_at_the_next_look_and_once() -> None:
    told = watched("Well, " + "and then " * 60 + "something else. " + "x" * 200)
    assert told == [
        (80, Derail(derail="token_cycle", first_token=5, excerpt=" and then")),
    ]


def test_a_period_that_is_longer_than_an_excerpt_is_shortened() -> None:
    text = "".join(chr(0x4E00 + index) for index in range(250))
    ((_, found),) = watched(text * 5)
    assert found.excerpt == text[:200]


@pytest.mark.parametrize(
    "opening", ["<tool_call>", "[TOOL_CALLS]", "<|tool_call_start|>", "<|python_tag|>", "<function="]
)
def test_a_flood_of_calls_that_nobody_closes_is_told(opening: str) -> None:
    calls = [f"{opening}read {'xyz'[n % 3] * (n % 5)}{n}, " for n in range(12)]
    text = "I look. " + "".join(calls) + "and more text"
    ((at, found),) = watched(text)
    assert found.derail == "tool_flood"
    tenth = len("I look. " + "".join(calls[:9]) + opening)
    assert at == -(-tenth // 16) * 16 and found.first_token == len("I look. " + opening) - 1
    assert found.excerpt == text[len("I look. ") :][:200]


def test_a_close_begins_the_count_again() -> None:
    nine = "".join(f"<tool_call>{n}" for n in range(9))
    assert watched(f"{nine}</tool_call>{nine}</tool_call>" + "".join(map(chr, range(0x4E00, 0x4E40)))) == []


def test_marks_are_seen_however_the_text_is_cut() -> None:
    text = "".join(f"<|tool_call_start|>{n}<tool_call>{n}" for n in range(11))
    choices = random.Random(4)
    for _ in range(50):
        watch = Watch(RULES, text_of)
        cuts = sorted(choices.sample(range(1, len(text)), 60))
        for index, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(text)], strict=True)):
            watch.see(text[start:end], index)
        found = watch.look(tokens(noise(64)))
        assert found is not None and found.derail == "tool_flood"


@pytest.mark.parametrize("was_told", [False, True])
@pytest.mark.parametrize(
    "text",
    ["Well, " + "and then " * 30, "".join(f"<tool_call>{n * 7919}" for n in range(30))],
    ids=["cycle", "flood"],
)
def test_a_resumed_turn_is_told_what_it_was_not_told_before(text: str, was_told: bool) -> None:
    (first_at, first), *_ = watched(text)
    for cut in range(0, len(text) - 32, 7):
        watch = Watch(RULES, text_of)
        generated = tokens([ord(character) for character in text[:cut]])
        watch.resume(generated, was_told=was_told)
        told = []
        for character in text[cut:]:
            watch.see(character, len(generated))
            generated.append(ord(character))
            if (found := watch.look(generated)) is not None:
                told.append((len(generated), found))
        if was_told and cut >= first_at:
            assert told == []
        elif cut >= first_at:
            assert told and told[0][1].derail == first.derail and told[0][0] <= cut + 16
        else:
            assert [at for at, _ in told] == [first_at]
            assert abs(told[0][1].first_token - first.first_token) < 16


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_period", 0), ("min_copies", 1), ("min_tokens", 1), ("every_tokens", 0), ("max_open_calls", 1)],
)
def test_rules_that_cannot_be_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        DerailRules(**{name: value})


@pytest.mark.parametrize(
    "values",
    [noise(30_000), [5] * 63, ([5] * 62 + [6]) * 40 + [5] * 30, [n % 2 for n in noise(30_000)]],
    ids=["text", "nearly a cycle", "near copies", "two tokens"],
)
def test_a_look_costs_little(values: list[int]) -> None:
    generated = tokens(noise(2000, 1) + values)
    costs = []
    for _ in range(50):
        started = time.perf_counter()
        find_cycle(generated, RULES)
        costs.append(time.perf_counter() - started)
    assert min(costs) < 0.5e-3
