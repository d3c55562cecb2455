"""Tokens become text up to a stop string: no token after it counts, and none of the prompt shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from router_rig import running_router

from kvhive.router.output_text import OutputText
from kvhive.router.sampling_params import SamplingParams
from kvhive.router.tokenizer import TextTokenizer
from kvhive.scripts.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_gguf)


@pytest.mark.parametrize("step", [1, 3, 100])
def test_what_came_after_the_token_that_completes_a_stop_counts_for_nothing(
    tokenizer: TextTokenizer, step: int
) -> None:
    """However many tokens come at once, as with speculation."""
    ids = tokenizer.encode("one two three four five six", False)
    output, text, counted = OutputText(tokenizer, ["ee fo"]), "", []
    for start in range(0, len(ids), step):
        piece, taken = output.push(ids[start : start + step])
        text += piece
        counted += taken
    assert (text + output.finish(), output.stopped) == ("one two thr", True)
    assert counted == output.token_ids == ids[: len(counted)]
    assert "ee fo" in tokenizer.decode(counted) and "ee fo" not in tokenizer.decode(counted[:-1])


def test_a_character_that_is_held_back_comes_at_the_end(tokenizer: TextTokenizer) -> None:
    """A beginning of a stop string and bytes of a character that the output breaks off in."""
    flamingo = tokenizer.encode("🦩", False)
    output = OutputText(tokenizer, ["end@@@"])
    text = output.push([*tokenizer.encode("the end", False), *flamingo[:-1]])[0]
    assert (text, output.finish(), output.stopped) == ("the ", "end\ufffd", False)


@pytest.mark.parametrize("max_drafts", [0, 4])
async def test_an_answer_ends_with_the_token_that_completes_the_stop(
    redis_server: EmbeddedRedis, demo_gguf: Path, max_drafts: int
) -> None:
    """Stops at six places of one answer, some amid accepted drafts; log-probabilities end there too."""
    async with running_router(redis_server.url, demo_gguf, count=1, max_drafts=max_drafts) as rig:
        tokenizer, prompt = rig.dispatcher._tokenizer, list(range(10))
        whole = await rig.ask(prompt, 30)
        pairs = [tokenizer.decode(whole.token_ids[end - 2 : end]) for end in range(6, 26)]
        for stop in [pair for pair in pairs if "\ufffd" not in pair][:6]:
            sampling = SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,), logprobs=2)
            cut = await rig.ask(prompt, sampling=sampling)
            assert cut.finished is not None and cut.finished.reason == "stop"
            assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
            assert len(cut.token_ids) == len(cut.logprobs) == cut.usage.completion_tokens
            assert cut.text == whole.text[: whole.text.index(stop)]
            assert stop in tokenizer.decode(cut.token_ids)
            assert stop not in tokenizer.decode(cut.token_ids[:-1])
        assert (rig.workers["w1"].engine.load.accepted_tokens > 0) == (max_drafts > 0)


async def test_a_prompt_that_ends_inside_a_character_does_not_show(
    redis_server: EmbeddedRedis, demo_gguf: Path
) -> None:
    """The first bytes of a rare emoji at its end, which the output may complete or not."""
    async with running_router(redis_server.url, demo_gguf, count=1, vocab_size=49152) as rig:
        tokenizer = rig.dispatcher._tokenizer
        prompt = tokenizer.encode("Hello world ", False) + tokenizer.encode("🦩", False)[:2]
        assert tokenizer.decode(prompt).endswith("\ufffd")
        answer = await rig.ask(prompt, 8)
        assert answer.text == tokenizer.decode(answer.token_ids) and not answer.text.startswith("Hello")
        assert answer.token_ids == rig.oracle(prompt, 8)
