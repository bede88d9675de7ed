"""Which tests hold the known faults of other servers away: the bugs of the research notes, by their numbers.

Only those of the gateway, its texts and sampling; a test that is renamed or deleted is missed here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .http_gateway import CHAT, HELLO, TEXT, Gateway

TESTS = Path(__file__).parents[1]
USER = {"role": "user", "content": "Hi"}

KNOWN_FAULTS: dict[str, tuple[str, ...]] = {
    "7 a client that leaves is computed for": (
        "gateway/test_stream.py::test_a_leaving_client_takes_its_run_along",
        "gateway/test_stream.py::test_a_client_that_leaves_in_line_is_not_forgotten",
        "gateway/test_stream.py::test_a_client_that_leaves_before_the_first_event_takes_its_run_along",
        "gateway/test_messages.py::test_a_leaving_client_takes_its_run_along",
        "gateway/test_responses_faults.py::test_a_client_that_leaves_without_a_stream_ends_its_run_too",
        "workers/test_bus.py::test_a_stream_that_is_gone_cancels_its_turn",
    ),
    "8 a line that changes each turn costs the whole prefix": (
        "gateway/test_volatile.py::test_two_calls_with_another_billing_header_are_equal",
        "gateway/test_volatile.py::test_running_counts_are_made_constant_where_they_stand",
        "gateway/test_messages_prefix.py::test_changing_lines_of_claude_code_cost_nothing",
    ),
    "14 a row samples by another row's rules": (
        "workers/test_grammar_turns.py::test_strict_plain_and_strict_rows_in_any_order_keep_to_their_own",
        "workers/test_grammar_turns.py::test_a_strict_turn_gives_in_company_what_it_gives_alone",
    ),
    "15 a seed is ignored or its neighbour's": (
        "workers/test_engine.py::test_seeds_repeat_differ_and_ignore_the_neighbours",
        "workers/test_sampling.py::test_a_seed_repeats_its_tokens_and_others_differ",
        "workers/test_scheduler.py::test_a_preempted_turns_text_seed_and_stop_go_on",
    ),
    "17 a silent stream is taken for dead": (
        "gateway/test_stream.py::test_a_silent_stream_is_kept_alive_with_its_progress",
        "gateway/test_messages.py::test_a_silent_stream_is_kept_alive_with_pings",
        "gateway/test_responses_faults.py::test_a_silent_stream_is_kept_alive_by_data_and_not_by_comments",
    ),
    "18 a call that is streamed leaks or vanishes": (
        "gateway/test_parse.py::test_every_cut_gives_the_same",
        "gateway/test_parse.py::test_hostile_text_gives_the_same_at_every_cut_and_loses_nothing",
        "gateway/test_tool_calls.py::test_a_stream_of_calls_reads_as_the_whole_answer_however_it_is_cut",
        "gateway/test_messages.py::test_a_stream_reads_as_the_whole_answer_however_it_is_cut",
        "gateway/test_responses.py::test_a_stream_adds_up_to_the_whole_body",
    ),
    "19 parallel calls are merged or renamed": (
        "gateway/test_tool_calls.py::test_calls_have_openais_shape",
        "gateway/test_tool_calls.py::test_a_stream_resumes_within_a_call_with_the_same_ids",
        "gateway/test_messages.py::test_parallel_calls_have_an_id_each_which_lasts",
        "gateway/test_responses.py::test_calls_have_stable_ids_of_their_own",
    ),
    "20 a call that was cut off is told as whole": (
        "gateway/test_tool_calls.py::test_a_call_that_is_cut_off_is_never_told_as_whole",
        "gateway/test_messages.py::test_a_call_that_is_cut_off_is_never_told_as_whole",
        "gateway/test_responses.py::test_a_call_cut_by_the_limit_is_incomplete_and_not_told_as_done",
        "gateway/test_structured_http.py::"
        "test_a_demanded_call_that_is_cut_ends_in_length_and_is_no_whole_call",
        "end_to_end/test_structured.py::test_a_demanded_call_that_is_cut_is_length",
    ),
    "21 an argument has another type or ends at a tag within it": (
        "gateway/test_parse.py::test_an_xml_value_has_the_type_of_its_schema",
        "gateway/test_parse.py::test_a_turn_is_taken_apart",
    ),
    "22 a thought is told as the answer or the answer as a thought": (
        "gateway/test_tool_calls.py::test_thinking_is_told_apart_by_what_the_prompt_opened",
        "gateway/test_messages.py::test_thinking_is_told_apart_by_what_the_prompt_opened",
        "gateway/test_tool_calls.py::test_a_thought_that_a_caller_closes_or_opens_is_not_the_prompts",
    ),
    "23 a character of several tokens is broken": (
        "workers/test_text.py::test_a_character_split_over_tokens_is_held_until_it_is_whole",
        "workers/test_text.py::test_an_emoji_family_survives_every_split_into_three_tokens",
        "workers/test_text.py::test_an_emoji_cut_by_the_token_limit_ends_in_one_replacement",
    ),
    "24 a stop string over a token's border is missed or sent": (
        "workers/test_text.py::test_a_stop_string_is_cut_at_every_split",
        "workers/test_text.py::test_overlapping_stop_strings_cut_where_the_first_is_complete",
        "workers/test_engine.py::test_a_stop_string_caps_tokens_and_text_where_it_is_complete",
        "gateway/test_tool_calls.py::test_a_stop_string_within_a_call_cuts_it_short",
    ),
    "25 a stream has two ends, none or null deltas": (
        "gateway/test_chat.py::test_a_stream_has_one_role_one_finish_one_usage_and_done",
        "gateway/test_openapi.py::test_chats_are_as_described",
        "gateway/test_messages.py::test_a_stream_is_told_in_anthropics_events",
    ),
    "26 cached tokens are not told": (
        "gateway/test_known_faults.py::test_tokens_from_the_cache_are_told_and_add_up_in_all_four_shapes",
        "gateway/test_messages_sdk.py::test_create_answers_with_a_message",
    ),
    "27 a Responses stream lacks events, and fields are dropped in silence": (
        "gateway/test_responses.py::test_the_events_of_a_stream_are_all_there_and_in_order",
        "gateway/test_responses.py::test_no_sequence_number_is_missing",
        "gateway/test_responses.py::test_no_part_comes_before_its_item_was_added",
        "gateway/test_responses_input.py::test_namespace_tools_are_not_dropped_and_hosted_tools_are",
        "gateway/test_responses_input.py::test_a_request_of_codex_with_all_its_fields",
        "gateway/test_responses_refused.py::test_a_bad_field_is_named",
    ),
    "28 an empty mask lets everything through": (
        "workers/test_grammar.py::test_an_empty_mask_is_an_error_and_no_end_of_the_turn",
        "workers/test_grammar_turns.py::test_an_empty_mask_fails_that_turn_alone_and_is_never_sampled_from",
        "workers/test_grammar_model.py::test_no_mask_is_an_error_rather_than_an_unmasked_row",
        "gateway/test_structured_http.py::test_a_schema_is_enforced_whatever_strict_says",
    ),
    "34 a wrong value drops the socket": (
        "gateway/test_api.py::test_no_value_in_any_field_brings_the_server_down",
        "gateway/test_chat.py::test_null_is_the_default",
        "gateway/test_chat.py::test_empty_stream_options_ask_for_nothing",
        "gateway/test_messages_body.py::test_any_body_is_taken_or_refused_in_words",
        "gateway/test_responses_refused.py::test_any_body_is_taken_or_refused_in_words",
        "gateway/test_native_fuzz.py::test_no_field_of_a_run_breaks_the_server",
        "gateway/test_native_fuzz.py::test_no_query_breaks_the_server",
    ),
    "35 of several text parts the last one wins": (
        "gateway/test_chat.py::test_content_parts_are_joined_in_order",
        "gateway/test_messages_body.py::test_content_parts_are_joined_in_order_each_on_its_line",
        "gateway/test_responses_input.py::test_no_text_part_is_lost",
    ),
    "36 a history whose thoughts are dropped breaks the prefix": (
        "gateway/test_tool_calls.py::test_the_turn_after_a_call_starts_with_the_generated_ids",
        "gateway/test_messages_prefix.py::test_the_turn_after_a_call_starts_with_the_generated_ids",
        "gateway/test_messages_body.py::test_a_thought_comes_back_as_it_was",
        "gateway/test_responses_input.py::test_the_next_prompt_starts_with_the_generated_ids",
    ),
}
NUMBERS = (7, 8, 14, 15, *range(17, 29), 34, 35, 36)


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of a file's test functions."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_bug_that_concerns_a_gateway_is_listed() -> None:
    assert [int(fault.split()[0]) for fault in KNOWN_FAULTS] == list(NUMBERS)


@pytest.mark.parametrize("fault", KNOWN_FAULTS)
def test_a_known_fault_has_its_tests(fault: str) -> None:
    for named in KNOWN_FAULTS[fault]:
        file, _, name = named.partition("::")
        assert name.startswith("test_") and name in names_in(file), named


async def test_tokens_from_the_cache_are_told_and_add_up_in_all_four_shapes(gateway: Gateway) -> None:
    async def usage(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        status, told = await gateway.post(body, path)
        assert status == 200, told
        return told["usage"], len(gateway.runs.last.order.token_ids) // 4

    for path, body in ((CHAT, HELLO), (TEXT, {"prompt": "Once upon a time"})):
        told, num_prompt = await usage(path, body)
        assert told["prompt_tokens_details"]["cached_tokens"] == num_prompt // 2 > 0
        assert told["prompt_tokens"] == num_prompt == told["total_tokens"] - told["completion_tokens"]
    told, num_prompt = await usage("/v1/responses", {"input": "Hi", "store": False})
    assert told["input_tokens_details"]["cached_tokens"] == num_prompt // 2 > 0
    assert told["input_tokens"] == num_prompt == told["total_tokens"] - told["output_tokens"]
    told, num_prompt = await usage("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [USER]})
    assert told["cache_read_input_tokens"] == num_prompt // 2 > 0
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(told[part] for part in parts) == num_prompt
