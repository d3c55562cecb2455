"""Tools and the choice among them, as Anthropic spells both."""

from __future__ import annotations

from kvhive.proto.errors import InvalidRequest
from kvhive.router.anthropic.cache_control import Markers, ttl_of
from kvhive.router.anthropic.fields import Fields
from kvhive.router.chat.messages import Tool, ToolChoice
from kvhive.router.field_checks import spell_text
from kvhive.router.http_body import json_type

_MODES = ("auto", "any", "tool", "none")


def read_tools(body: Fields, markers: Markers) -> tuple[Tool, ...]:
    """Read `tools`. Raises InvalidRequest."""
    return tuple(
        _tool(Fields(f"tools[{index}]", tool, body.ignored), markers)
        for index, tool in enumerate(body.take("tools", list, []))
    )


def _tool(fields: Fields, markers: Markers) -> Tool:
    kind = fields.take_any("type")
    if kind not in (None, "custom"):
        shown = spell_text(kind) if isinstance(kind, str) else json_type(kind)
        raise InvalidRequest(
            fields.path("type"), f"must be 'custom', is {shown}: tools that a server runs are not supported"
        )
    ttl = ttl_of(fields)
    tool = Tool(
        name=fields.need("name", str),
        description=fields.take("description", str, ""),
        parameters=fields.need_schema("input_schema"),
    )
    fields.ignore({name: f"tools.{name}" for name in ("eager_input_streaming", "strict")})
    fields.only("defer_loading", (False,))
    fields.only("allowed_callers", (["direct"],))
    fields.only("input_examples", ([],))
    fields.close()
    if ttl:
        markers.note(ttl, fields.where, None)
    return tool


def read_tool_choice(body: Fields) -> ToolChoice:
    """Read `tool_choice`. Raises InvalidRequest."""
    fields = body.child("tool_choice")
    if fields is None:
        return ToolChoice()
    kind = fields.one_of("type", _MODES)
    name: str = fields.need("name", str) if kind == "tool" else ""
    alone: bool = fields.take("disable_parallel_tool_use", bool, False)
    fields.close()
    match kind:
        case "any" | "tool":
            return ToolChoice("required", name, not alone)
        case "none":
            return ToolChoice("none", parallel=not alone)
        case _:
            return ToolChoice("auto", parallel=not alone)
