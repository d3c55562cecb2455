"""The tools of a chat, and which of them the model is to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhive.proto.errors import InvalidRequest
from kvhive.router.chat.messages import MAX_TOOLS, NO_PARAMETERS, Tool, ToolChoice
from kvhive.router.field_checks import spell_text
from kvhive.router.http_body import json_type
from kvhive.router.json_fields import typed
from kvhive.router.openai.field_policy import GivenFields, refuse_others
from kvhive.router.schema_text import schema_text

_MODES = ("auto", "none", "required")


def read_tools(given: GivenFields) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools and the choice. Raises InvalidRequest.

    With `allowed_tools` the others are left out, of the prompt as well: a call of theirs cannot happen.
    """
    offered: list[Any] = typed(given, "tools", list, [])
    if len(offered) > MAX_TOOLS:
        raise InvalidRequest("tools", f"must be at most {MAX_TOOLS} tools, is {len(offered)}")
    tools = tuple(_tool(given, f"tools[{index}]", tool) for index, tool in enumerate(offered))
    parallel: bool = typed(given, "parallel_tool_calls", bool, True)
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, str):
        if choice not in _MODES:
            raise InvalidRequest(
                "tool_choice", f"must be {', '.join(_MODES)} or an object, is {spell_text(choice)}"
            )
        return tools, ToolChoice(choice, parallel=parallel)  # type: ignore[arg-type]
    if not isinstance(choice, dict):
        raise InvalidRequest("tool_choice", f"must be a string or an object, is {json_type(choice)}")
    if choice.get("type") == "allowed_tools":
        return _allowed(tools, choice, parallel)
    return tools, ToolChoice("required", _named("tool_choice", choice), parallel)


def _tool(given: GivenFields, where: str, tool: object) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidRequest(where, f"must be an object, is {json_type(tool)}")
    _check_function(where, tool)
    refuse_others(where, tool, frozenset({"type", "function"}))
    function = tool["function"]
    where = f"{where}.function"
    refuse_others(where, function, frozenset({"name", "description", "parameters", "strict"}))
    if _field(where, function, "strict", bool, False):
        given.ignore("tools.function.strict")  # calls that are required follow their schemas in any case
    parameters = _field(where, function, "parameters", dict, None)
    return Tool(
        _field(where, function, "name", str, ""),
        _field(where, function, "description", str, ""),
        NO_PARAMETERS if parameters is None else schema_text(f"{where}.parameters", parameters),
    )


def _allowed(
    tools: tuple[Tool, ...], choice: Mapping[str, Any], parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    where = "tool_choice.allowed_tools"
    refuse_others("tool_choice", choice, frozenset({"type", "allowed_tools"}))
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise InvalidRequest(where, f"must be an object, is {json_type(allowed)}")
    refuse_others(where, allowed, frozenset({"mode", "tools"}))
    mode = _field(where, allowed, "mode", str, "")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{where}.mode", f"must be auto or required, is {spell_text(mode)}")
    listed: list[Any] = _field(where, allowed, "tools", list, [])
    if not 1 <= len(listed) <= MAX_TOOLS:
        raise InvalidRequest(f"{where}.tools", f"must be 1 to {MAX_TOOLS} tools, is {len(listed)}")
    offered = {tool.name for tool in tools}
    names = set()
    for index, item in enumerate(listed):
        name = _named(f"{where}.tools[{index}]", item)
        if name not in offered:
            raise InvalidRequest(
                f"{where}.tools[{index}]", f"must name one of the tools, is {spell_text(name)}"
            )
        names.add(name)
    return (
        tuple(tool for tool in tools if tool.name in names),
        ToolChoice("auto" if mode == "auto" else "required", parallel=parallel),
    )


def _named(where: str, item: object) -> str:
    """Return the name in an object that names a function."""
    if not isinstance(item, dict):
        raise InvalidRequest(where, f"must be an object, is {json_type(item)}")
    _check_function(where, item)
    refuse_others(where, item, frozenset({"type", "function"}))
    name: str = _field(f"{where}.function", item["function"], "name", str, "")
    if not name:
        raise InvalidRequest(f"{where}.function.name", "must not be empty")
    return name


def _check_function(where: str, item: Mapping[str, Any]) -> None:
    kind = item.get("type")
    if kind != "function":
        shown = spell_text(kind) if isinstance(kind, str) else json_type(kind)
        raise InvalidRequest(f"{where}.type", f"must be 'function', is {shown}")
    if not isinstance(item.get("function"), dict):
        raise InvalidRequest(f"{where}.function", f"must be an object, is {json_type(item.get('function'))}")


def _field(where: str, item: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = item.get(name)
    return default if value is None else typed({f"{where}.{name}": value}, f"{where}.{name}", kind, None)
