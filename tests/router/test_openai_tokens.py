"""POST /tokenize and /detokenize: what generation would compute, in vLLM's shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from open_doors import open_doors

from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.scripts.embedded_redis import EmbeddedRedis


async def test_texts_and_conversations_have_the_tokens_of_generation(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    async with open_doors(redis_server.url, demo_gguf, count=1) as doors:
        root = str(doors.openai.base_url).removesuffix("/v1/")
        text = "Grüße, 世界! \N{BIRD} <|im_end|>"
        async with httpx.AsyncClient(base_url=root, timeout=30) as http:
            plain = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
            chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "model": "demo"}
            turns = (await http.post("/tokenize", json=chat)).json()
            back = (await http.post("/detokenize", json={"tokens": plain["tokens"]})).json()
            bad = await http.post("/detokenize", json={"tokens": [1, 49152]})
        expected = await doors.grpc.Tokenize(pb.TokenizeRequest(text=text))
        message = pb.ChatMessage(role="user", content=text)
        expected_chat = await doors.grpc.Tokenize(pb.TokenizeRequest(chat=pb.Chat(messages=[message])))
    assert plain["tokens"] == list(expected.token_ids) and plain["count"] == len(expected.token_ids)
    assert len(plain["token_strs"]) == plain["count"] and plain["token_strs"][0] in text
    assert turns["tokens"] == list(expected_chat.token_ids) and turns["token_strs"] is None
    assert turns["max_model_len"] > turns["count"] > plain["count"]
    assert back == {"prompt": text}
    assert bad.status_code == 400
    assert bad.json()["error"]["message"] == "tokens[1]: must be between 0 and 49151, is 49152"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("tokenize", {}, 400, "prompt: is required, or messages"),
        ("tokenize", {"prompt": 5}, 400, "prompt: must be a string, is an integer"),
        ("tokenize", {"prompt": "a", "messages": []}, 400, "prompt: must not be given with messages"),
        ("tokenize", {"prompt": "a", "tools": []}, 400, "tools: must not be given without messages"),
        (
            "tokenize",
            {"prompt": "a", "add_special_tokens": False},
            400,
            "add_special_tokens: is not supported, other than true",
        ),
        ("tokenize", {"messages": [{"role": 1}]}, 400, "messages[0].role: must be a string, is an integer"),
        ("tokenize", {"prompt": "refuse bad"}, 400, "prompt: is too long"),
        ("tokenize", {"prompt": "refuse busy"}, 429, "full"),
        ("tokenize", {"prompt": "a", "model": "x"}, 404, "model: 'x' is not served here"),
        ("detokenize", {}, 400, "tokens: is required"),
        ("detokenize", {"tokens": [1, "a"]}, 400, "tokens[1]: must be a token id, is a string"),
        ("detokenize", {"tokens": [1], "x": 1}, 400, "x: is not supported"),
        ("detokenize", {"tokens": [1], "model": "x"}, 404, "model: 'x' is not served here"),
    ],
)
async def test_refusals_name_field_limit_and_value(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    response = await http.post(f"/{path}", json=body)
    assert response.status_code == status
    assert response.json()["error"]["message"] == message


async def test_a_body_that_is_no_json_is_the_callers_fault(http: httpx.AsyncClient) -> None:
    for path in ("/tokenize", "/detokenize"):
        assert (await http.post(path, content=b"[1]")).status_code == 400
        assert (await http.post(path, content=b"x" * 300_000)).status_code == 413
        assert (await http.get(path)).status_code == 405
