"""What each field of a Messages body must be, in words for who sent it."""

from __future__ import annotations

from gateway.http.fields import MAX_STOP_CHARS, MAX_STOPS, REMEDIES

MESSAGES_REMEDIES = {
    name: REMEDIES[name]
    for name in (
        *("model", "stream", "tetrarch", "session", "agent", "parent", "fork_tokens", "expects", "final"),
        *("retain", "explain", "class", "priority", "expected_output_tokens"),
    )
} | {
    "messages": "a non-empty list of messages, the last one not the assistant's",
    "role": "'user', 'assistant' or 'system'",
    "content": "a string or a list of content blocks",
    "system": "a string or a list of blocks {'type': 'text', 'text': ...}",
    "max_tokens": "a whole number from 1",
    "temperature": "a number from 0 to 1",
    "top_p": "a number above 0 and up to 1",
    "top_k": "a whole number from 0 (off)",
    "stop_sequences": f"a list of at most {MAX_STOPS} non-empty strings of up to {MAX_STOP_CHARS} characters",
    "metadata": "an object",
    "tools": "a list of {'name': ..., 'description': ..., 'input_schema': {...}}",
    "tool_choice": "{'type': 'auto'}, 'any', 'none' or {'type': 'tool', 'name': ...}",
    "disable_parallel_tool_use": "true or false",
    "thinking": "{'type': 'adaptive'}, 'enabled' with 'budget_tokens', 'between_tools' or 'disabled'",
    "budget_tokens": "a whole number from 1",
    "display": "'summarized' or 'omitted'",
    "output_config": "an object with 'effort' and 'format'",
    "effort": "'low', 'medium', 'high', 'xhigh' or 'max'",
    "format": "{'type': 'json_schema', 'schema': {...}}",
    "output_format": "{'type': 'json_schema', 'schema': {...}}",
    "schema": "a JSON schema: an object",
    "container": "absent: this server runs no code",
    "mcp_servers": "absent or empty: this server calls no MCP servers; let the client offer their tools",
    "thread": "absent: this server keeps no threads; send the whole conversation",
    "text": "a string",
    "signature": "a string",
    "name": "a non-empty string",
    "description": "a string",
    "input_schema": "a JSON schema: an object",
    "strict": "true or false",
    "defer_loading": "true or false",
    "id": "a string",
    "tool_use_id": "a string",
    "input": "an object",
    "is_error": "true or false",
}
