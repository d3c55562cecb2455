"""This dialect described for programs: the OpenAPI document of GET /openapi.json.

It says what is accepted, limits included, as far as a schema can: that a prompt and max_tokens fit into the
model's context together, for example, is in the words of a refusal only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhive.proto.limits import MAX_CACHE_NAME_CHARS, MAX_REQUEST_ID_CHARS
from kvhive.router.frontend import ModelInfo
from kvhive.router.http_headers import CACHE_KEY_HEADER, IGNORED_HEADER
from kvhive.router.openai import openapi_answers as answers
from kvhive.router.openai import openapi_requests as requests

Schema = dict[str, Any]

_REFUSALS: Mapping[int, str] = {
    400: "A field is not as it must be; `param` names it.",
    401: "There are API keys here, and none of them was sent.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too much to do; `retry-after` and `retry-after-ms` say when to come again.",
    500: "A fault of the server's.",
    503: "No worker serves; `retry-after` and `retry-after-ms` say when to come again.",
    504: "The first token did not come in time.",
}


def openapi_document(model: ModelInfo) -> Schema:
    """Return the document; limits that depend on the model are those of this one."""
    completion = {"chat": requests.chat_completion(model), "text": requests.text_completion(model)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvhive, in OpenAI's dialect",
            "version": "1",
            "description": "Fields that are not listed are refused by name; what is ignored is named in the "
            f"answer's header {IGNORED_HEADER}.",
        },
        "paths": {
            "/v1/chat/completions": _post(
                "Answer a conversation.", completion["chat"], answers.chat_completion(), streamed=True
            ),
            "/v1/completions": _post(
                "Continue prompts.", completion["text"], answers.text_completion(), streamed=True
            ),
            "/tokenize": _post(
                "Turn a text or a conversation into tokens.", requests.tokenize(model), answers.tokenized()
            ),
            "/detokenize": _post("Turn tokens into text.", requests.detokenize(model), answers.DETOKENIZED),
            "/v1/models": _get("List the models.", answers.MODELS),
            "/v1/models/{name}": _get("Describe a model.", answers.MODEL, _path("name")),
        },
    }


def _post(summary: str, body: Schema, answer: Schema, streamed: bool = False) -> Schema:
    content: Schema = {"application/json": {"schema": answer}}
    parameters = [
        _header("x-request-id", {"type": "string", "maxLength": MAX_REQUEST_ID_CHARS, "pattern": "^[!-~]*$"})
    ]
    if streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
        parameters.append(_header(CACHE_KEY_HEADER, {"type": "string", "maxLength": MAX_CACHE_NAME_CHARS}))
    return {
        "post": {
            "summary": summary,
            "parameters": parameters,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": {"description": "The answer.", "content": content},
                **{str(status): _refusal(why) for status, why in _REFUSALS.items()},
            },
        }
    }


def _get(summary: str, answer: Schema, *parameters: Schema) -> Schema:
    content = {"application/json": {"schema": answer}}
    refusals = {str(status): _refusal(_REFUSALS[status]) for status in (401, 404)}
    return {
        "get": {
            "summary": summary,
            "parameters": list(parameters),
            "responses": {"200": {"description": "The answer.", "content": content}, **refusals},
        }
    }


def _header(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _refusal(why: str) -> Schema:
    return {"description": why, "content": {"application/json": {"schema": answers.ERROR}}}
