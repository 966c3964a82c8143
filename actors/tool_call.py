"""The model's tool call: JSON inside `<tool_call>` tags, or a typed reason why it is none.

Consumes    the text of one turn
Produces    `ToolCall`, or `Malformed` with the text that the model sees instead of a result
Waits for   nothing
Invariant   any text gives a value, never an exception; a turn without a tag gives None
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = re.compile(rf"{OPEN}(.*?){CLOSE}", re.DOTALL)


class MalformedReason(StrEnum):
    """Why a call is none."""

    UNCLOSED_TAG = "unclosed_tag"
    SEVERAL_CALLS = "several_calls"
    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"
    UNKNOWN_TOOL = "unknown_tool"
    MISSING_CODE = "missing_code"
    NOT_A_STRING = "not_a_string"
    LONE_SURROGATE = "lone_surrogate"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that can be executed."""

    code: str
    input: str = ""
    """Standard input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Malformed:
    """A call that cannot be executed; it counts as a failed call."""

    reason: MalformedReason
    text: str
    """What the model sees."""


def parse_call(text: str, tool_name: str) -> ToolCall | Malformed | None:
    """Reads the one call of a turn: `{"name": tool_name, "arguments": {"code": ..., "input": ...}}`."""
    opened, closed = text.count(OPEN), text.count(CLOSE)
    if not opened and not closed:
        return None
    bodies = CALL.findall(text)
    if len(bodies) > 1:
        return _malformed(MalformedReason.SEVERAL_CALLS, f"{len(bodies)} calls in one turn; make one at a time")
    if not opened == closed == len(bodies):
        return _malformed(MalformedReason.UNCLOSED_TAG, f"a call stands between {OPEN} and {CLOSE}")
    try:
        call = json.loads(bodies[0])
    except RecursionError:
        return _malformed(MalformedReason.BAD_JSON, "nested too deep")
    except ValueError as error:
        return _malformed(MalformedReason.BAD_JSON, str(error))
    return _from_json(call, tool_name)


def without_calls(text: str) -> str:
    """The text with its calls cut out, an unclosed one up to the end."""
    return CALL.sub("", text).partition(OPEN)[0]


def _from_json(call: Any, tool_name: str) -> ToolCall | Malformed:
    if not isinstance(call, dict):
        return _malformed(MalformedReason.NOT_AN_OBJECT, 'expected {"name": ..., "arguments": {...}}')
    if call.get("name") != tool_name:
        return _malformed(MalformedReason.UNKNOWN_TOOL, f"the only tool is {tool_name}")
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return _malformed(MalformedReason.NOT_AN_OBJECT, '"arguments" must be an object')
    if "code" not in arguments:
        return _malformed(MalformedReason.MISSING_CODE, 'argument "code" is missing')
    values = {"code": arguments["code"], "input": arguments.get("input", "")}
    for field, value in values.items():
        if not isinstance(value, str):
            return _malformed(MalformedReason.NOT_A_STRING, f'argument "{field}" must be a string')
        if any("\ud800" <= character <= "\udfff" for character in value):
            return _malformed(MalformedReason.LONE_SURROGATE, f'argument "{field}" is not valid Unicode')
    return ToolCall(**values)


def _malformed(reason: MalformedReason, detail: str) -> Malformed:
    return Malformed(reason=reason, text=f"malformed tool call ({reason}): {detail}")
