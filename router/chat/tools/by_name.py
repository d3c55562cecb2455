"""Which format a model writes its calls in: by name, or by its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from kvhive.proto.errors import ConfigError
from kvhive.router.chat.tools.deepseek import CALLS_OPEN, DEEPSEEK, DEEPSEEK_V31, FENCE
from kvhive.router.chat.tools.form import ToolForm
from kvhive.router.chat.tools.granite import GRANITE
from kvhive.router.chat.tools.granite import OPEN as GRANITE_OPEN
from kvhive.router.chat.tools.hermes import HERMES, OPEN
from kvhive.router.chat.tools.llama import LLAMA_JSON, TAG
from kvhive.router.chat.tools.mistral import ARGUMENTS, MISTRAL, MISTRAL_ARGS
from kvhive.router.chat.tools.mistral import OPEN as MISTRAL_OPEN
from kvhive.router.chat.tools.pythonic import PYTHONIC, START
from kvhive.router.chat.tools.qwen_coder import FUNCTION, PARAMETER, QWEN_CODER

FORMS = {
    form.name: form
    for form in (
        HERMES,
        QWEN_CODER,
        LLAMA_JSON,
        PYTHONIC,
        MISTRAL,
        MISTRAL_ARGS,
        DEEPSEEK,
        DEEPSEEK_V31,
        GRANITE,
    )
}
"""All formats."""

AUTO, NONE = "auto", "none"


def tool_form(name: str, template: str | None, has_token: Callable[[str], bool]) -> ToolForm | None:
    """Return the format of a configured name, or the model's own for `auto`; `none` finds no calls.

    Raises ConfigError naming the known ones.
    """
    if name == NONE:
        return None
    if name == AUTO:
        return detected(template or "", has_token)
    if name not in FORMS:
        raise ConfigError(
            f"router.tool_format: must be one of {', '.join((AUTO, NONE, *FORMS))}, is {name!r}"
        )
    return FORMS[name]


def detected(template: str, has_token: Callable[[str], bool]) -> ToolForm:
    """Return the format that a template has, or else a vocabulary; Hermes's where nothing tells.

    In that format the router itself describes tools to a model whose template knows none.
    """
    if FUNCTION in template and PARAMETER in template:
        return QWEN_CODER
    if CALLS_OPEN in template:
        return DEEPSEEK if FENCE in template else DEEPSEEK_V31
    if MISTRAL_OPEN in template:
        return MISTRAL_ARGS if ARGUMENTS in template or has_token(ARGUMENTS) else MISTRAL
    if GRANITE_OPEN in template or (has_token(GRANITE_OPEN) and _knows_tools(template)):
        return GRANITE
    if START in template or "func_name1(" in template:
        return PYTHONIC
    if OPEN not in template and (TAG in template or '"parameters": ' in template):
        return LLAMA_JSON
    return HERMES


def _knows_tools(template: str) -> bool:
    """Tell whether a template speaks of tools, and not in Hermes's way."""
    return "tools" in template and OPEN not in template
