"""The HTTP door described for programs: the OpenAPI document of GET /openapi.json, in both dialects.

It says what is accepted, limits included, as far as a schema can: that a prompt and max_tokens fit into the
model's context together, for example, is in the words of a refusal only.
"""

from __future__ import annotations

from kvhive.router.anthropic import openapi as anthropic
from kvhive.router.anthropic.api import VERSION_HEADER
from kvhive.router.frontend import ModelInfo
from kvhive.router.http_headers import IGNORED_HEADER
from kvhive.router.openai import openapi as openai
from kvhive.router.openapi_parts import Schema, get, header, path_name, refusals

_MODEL_REFUSALS = {401: "There are API keys here, and none of them was sent.", 404: "There is no such model."}


def openapi_document(model: ModelInfo) -> Schema:
    """Return the document; limits that depend on the model are those of this one."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvhive, in OpenAI's and in Anthropic's dialect",
            "version": "1",
            "description": "Fields that are not listed are refused by name; what is ignored is named in the "
            f"answer's header {IGNORED_HEADER}.",
        },
        "paths": {
            **openai.paths(model),
            **anthropic.paths(model),
            "/v1/models": _models("List the models.", openai.MODELS, anthropic.MODELS),
            "/v1/models/{name}": _models(
                "Describe a model.", openai.MODEL, anthropic.MODEL, path_name("name")
            ),
        },
    }


def _models(summary: str, answer: Schema, anthropic_answer: Schema, *parameters: Schema) -> Schema:
    """Return a path that answers in the dialect of whoever asks: Anthropic's clients name a version."""
    version = header(VERSION_HEADER.decode(), {"type": "string"})
    errors = refusals(_MODEL_REFUSALS, {"anyOf": [openai.ERROR, anthropic.ERROR]})
    return get(summary, {"anyOf": [answer, anthropic_answer]}, errors, *parameters, version)
