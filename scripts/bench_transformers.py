"""A door to transformers' continuous batching that `kvhive bench engine` can knock at.

`python -m kvhive.scripts.bench_transformers MODEL` serves POST /v1/completions of one prompt of token ids,
greedy and streamed; transformers' own server takes text only. Nothing but this file stands between the two.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import click
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MAX_CONTEXT = 4096
"""Longest prompt and output together that is taken: what the pool's size is checked against."""


class TransformersDoor:
    """One model and its continuous-batching manager. Start before use; one event loop."""

    def __init__(self, model: Path, dtype: str, pool_tokens: int, page_tokens: int, step_tokens: int) -> None:
        """Load the model. Takes seconds."""
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._name = model.name
        self._manager: Any = loaded.eval().init_continuous_batching(
            # No token ends the output: every request gets the work that it asks for.
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page_tokens,
                num_blocks=pool_tokens // page_tokens,
                max_batch_tokens=step_tokens,
                max_requests_per_batch=16,
                use_cuda_graph=False,
                use_async_batching=False,
            ),
        )
        self._served = 0

    def app(self) -> Starlette:
        """Start computing and return the ASGI application."""
        self._manager.start()
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/version", self._version),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    def close(self) -> None:
        """Stop computing."""
        self._manager.stop(block=True, timeout=10, hard_stop=True)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": installed_version("transformers")})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        prompt, max_tokens = body["prompt"], body["max_tokens"]
        if not prompt or {*map(type, prompt)} != {int} or not 1 <= max_tokens <= MAX_CONTEXT - len(prompt):
            message = f"prompt: must be token ids, with max_tokens at most {MAX_CONTEXT}"
            return JSONResponse({"error": {"message": message}}, 400)
        return StreamingResponse(self._stream(prompt, max_tokens), media_type="text/event-stream")

    async def _stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[bytes]:
        self._served += 1
        name, results = f"bench-{self._served}", asyncio.Queue[Any](max_tokens + 1)
        self._manager.register_result_handler(name, results.put_nowait)
        self._manager.add_request(
            prompt, request_id=name, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1
        )
        count, ended = 0, False
        try:
            while not ended:
                result = await results.get()
                count, ended = len(result.generated_tokens), result.is_finished()
                if result.error:
                    yield _event({"error": {"message": result.error}})
                    return
                # Token ids as text: detokenising is no part of what is measured here.
                text = "".join(f" {token}" for token in result.generated_tokens[-1:])
                yield _event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        finally:
            if not ended:
                self._manager.cancel_request(name)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        yield _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--port", default=8103, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--threads", default=0, help="Compute threads; 0 leaves torch's default.")
@click.option("--pool-tokens", default=25_600, show_default=True, help="Size of the KV pool.")
@click.option("--page-tokens", default=64, show_default=True)
@click.option("--step-tokens", default=512, show_default=True, help="Most tokens in one batch.")
def main(
    model: Path, port: int, dtype: str, threads: int, pool_tokens: int, page_tokens: int, step_tokens: int
) -> None:
    """Serve until interrupted."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    door = TransformersDoor(model, dtype, pool_tokens, page_tokens, step_tokens)
    try:
        uvicorn.run(door.app(), host="127.0.0.1", port=port, http="h11", log_level="warning")
    finally:
        door.close()


if __name__ == "__main__":
    main()
