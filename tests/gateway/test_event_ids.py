"""What follows what in a stream."""

from __future__ import annotations

import pytest

from gateway.runs.event_ids import follows, id_pair
from workers.messages import RUN_END_ID


@pytest.mark.parametrize(
    ("before", "after", "follow"),
    [
        ("0-0", "0-1", True),
        ("0-0", "0-2", False),
        ("0-1", "1-1", True),
        ("0-1", "1-2", False),
        ("1-1", "1-2", True),
        ("1-2", "1-4", False),
        ("1-9", "1-10", True),
        ("1-9", "3-1", True),
        ("1-9", "2-2", False),
        ("1-9", RUN_END_ID, True),
    ],
)
def test_a_missing_event_is_seen(before: str, after: str, follow: bool) -> None:
    assert follows(before, after) is follow


def test_ids_compare_as_numbers() -> None:
    assert id_pair("1-10") > id_pair("1-9")
