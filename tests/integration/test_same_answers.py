"""Whatever the cluster does, cached or not, alone or in company, the answer is that of transformers."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from inference import Client, by_chat, by_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# Around the ends of blocks and chunks; few are long, since both sides compute each of them several times.
LENGTHS = [*(1, 2, 3, 5, 8, 13, 15, 16, 17, 18, 21, 31, 32, 33, 47, 48, 49, 64, 65, 66, 80, 95, 96, 100)]
LENGTHS += [128, 129, 256, 300, 512, 600]
NEW_TOKENS = 5
TIE = 1e-3


class Oracle:
    """Greedy continuations by transformers on the same weights in float32."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.ties = 0

    def greedy(self, prompt: list[int], length: int) -> list[int]:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def assert_same(self, prompt: list[int], got: list[int], expected: list[int]) -> None:
        """Equal, or first different at a numeric tie (top-2 gap under 1e-3)."""
        import torch

        if got == expected:
            return
        assert len(got) == len(expected)
        at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
        logprobs = torch.log_softmax(logits.double(), -1)
        gap = (logprobs[expected[at]] - logprobs[got[at]]).abs().item()
        assert gap < TIE, (
            f"prompt of {len(prompt)}: token {at} is {got[at]}, not {expected[at]}, gap {gap:.4f}"
        )
        self.ties += 1


@pytest.fixture(scope="module")
def oracle(hf_model: Any) -> Iterator[Oracle]:
    """With both cores: the cluster waits while transformers computes."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Oracle(hf_model)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts(hf_tokenizer: Any) -> list[list[int]]:
    """30 prompts of 1 to 600 tokens of plain English that diverge early."""
    rng = random.Random(11)
    words = [
        "river",
        "stone",
        "evening",
        "copper",
        "ladder",
        "window",
        "garden",
        "winter",
        "letter",
        "market",
    ]
    made = []
    for length in LENGTHS:
        text = " ".join(rng.choice(words) for _ in range(length + 8))
        made.append(hf_tokenizer(text)["input_ids"][:length])
    assert [len(prompt) for prompt in made] == LENGTHS
    return made


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[list[int]]) -> list[list[int]]:
    return [oracle.greedy(prompt, NEW_TOKENS) for prompt in prompts]


async def test_cold_and_warm_answers_alone_equal_transformers(
    cluster: Any, oracle: Oracle, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with Client(cluster.grpc) as client:
        for prompt, tokens in zip(prompts, expected, strict=True):
            salt = secrets.token_hex(4)
            cold = await client.generate(by_tokens(prompt, NEW_TOKENS, cache_salt=salt))
            warm = await client.generate(by_tokens(prompt, NEW_TOKENS, cache_salt=salt))
            # On a machine that has much else to do, the other worker may have pulled it.
            assert (cold.found, warm.found) == (0, (len(prompt) - 1) // 16 * 16), warm.usage
            oracle.assert_same(prompt, cold.token_ids, tokens)
            oracle.assert_same(prompt, warm.token_ids, tokens)
    assert oracle.ties <= 3, "ties are rare; this many are a fault"


async def test_answers_of_eight_at_once_equal_transformers(
    cluster: Any, oracle: Oracle, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Mixed batches, chunked prefills, cold in the first round and warm in the second."""
    salt, gate = secrets.token_hex(4), asyncio.Semaphore(8)
    async with Client(cluster.grpc) as client:

        async def one(prompt: list[int]) -> list[int]:
            async with gate:
                return (await client.generate(by_tokens(prompt, NEW_TOKENS, cache_salt=salt))).token_ids

        for _ in range(2):
            answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
            for prompt, got, tokens in zip(prompts, answers, expected, strict=True):
                oracle.assert_same(prompt, got, tokens)
    assert oracle.ties <= 6


async def test_the_text_of_a_chat_equals_what_transformers_renders_and_decodes(
    cluster: Any, oracle: Oracle, hf_tokenizer: Any
) -> None:
    turns = [("system", "You answer briefly."), ("user", "Name three colours of the sky, with an emoji 🌅.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = hf_tokenizer(rendered, add_special_tokens=False)["input_ids"]
    async with Client(cluster.grpc) as client:
        result = await client.generate(by_chat(*turns, max_tokens=40))
    assert result.usage is not None and result.usage.prompt_tokens == len(prompt)
    oracle.assert_same(prompt, result.token_ids, oracle.greedy(prompt, len(result.token_ids)))
    assert result.text == hf_tokenizer.decode(result.token_ids, skip_special_tokens=True)
