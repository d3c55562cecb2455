"""What this dialect takes and answers, for the OpenAPI document. See router/openapi."""

from __future__ import annotations

from kvhive.router.frontend import ModelInfo
from kvhive.router.openai import openapi_answers as answers
from kvhive.router.openai import openapi_requests as requests
from kvhive.router.openapi_parts import Schema, post, refusals

ERROR, MODEL, MODELS = answers.ERROR, answers.MODEL, answers.MODELS

_REFUSALS = {
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


def paths(model: ModelInfo) -> Schema:
    """Return the paths that are this dialect's alone."""
    errors = refusals(_REFUSALS, ERROR)
    chat, text = requests.chat_completion(model), requests.text_completion(model)
    return {
        "/v1/chat/completions": post(
            "Answer a conversation.", chat, answers.chat_completion(), errors, streamed=True
        ),
        "/v1/completions": post("Continue prompts.", text, answers.text_completion(), errors, streamed=True),
        "/tokenize": post(
            "Turn a text or a conversation into tokens.",
            requests.tokenize(model),
            answers.tokenized(),
            errors,
        ),
        "/detokenize": post(
            "Turn tokens into text.", requests.detokenize(model), answers.DETOKENIZED, errors
        ),
    }
