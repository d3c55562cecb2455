"""A GGUF file and a directory with safetensors of one model: equal token ids, equal answers, equal ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from chats import encode_chat
from real_engine import RealEngine, request
from tiny_models import tiny, write_gguf
from tiny_tokenizer import BOS, EOS, EOT, MERGES, SPECIAL, TEMPLATE, save_tokenizer, words

from kvhive.router.chat.messages import ChatMessage
from kvhive.router.tokenizer import TextTokenizer
from kvhive.worker.sequence import FinishReason

TEXTS = [
    "hello world",
    " hello",
    "hello ",
    "hello  world",
    "    hello",
    "  ",
    "a\tb",
    "\n",
    "\n\n\n",
    "a\r\nb",
]
TEXTS += [
    "naïve café",
    "ÄÖÜ ß",
    "e\u0301",
    "Привет",
    "你好，世界",
    "こんにちは",
    "שלום",
    "नमस्ते",
    "😀",
    "👩‍👩‍👧 family 🇩🇪",
]
TEXTS += [
    "0",
    "12",
    "123",
    "1234567",
    "3.14",
    "a1b22 c333",
    " 1",
    "  12",
    "²³",
    "x's X'S don't",
    "!! !!!",
    "...\n",
]
TEXTS += [
    "\x00",
    "\x7f\x01",
    "\ufeff\u200b",
    "\ufffd",
    '{"a": [1, 2]}',
    "def f(x):\n    return x",
    "<|im",
    "|end|>",
]
TEXTS += [
    *SPECIAL,
    *(f"a{token} hello" for token in SPECIAL),
    "".join(SPECIAL),
    "<|im_start|>user\nhello<|im_end|>",
]
CHAT = [ChatMessage("system", "hello"), ChatMessage("user", "world <|im_end|> 123 é😀")]


@pytest.fixture(params=["gpt-2", "llama-bpe"])
def forms(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    pre = request.param
    model = tiny("Llama", vocab_size=len(words()), bos_token_id=BOS, eos_token_id=[EOS, EOT])
    model.save_pretrained(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf", pre)

    def write_tokenizer(writer: object) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(words())
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(words()) - len(SPECIAL)))
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(EOS)
        writer.add_eot_token_id(EOT)
        writer.add_add_bos_token(pre == "llama-bpe")
        writer.add_chat_template(TEMPLATE)

    return tmp_path / "hf", write_gguf(tmp_path / "model.gguf", model, write_tokenizer=write_tokenizer)


def test_token_ids_answers_and_ends_are_equal(forms: tuple[Path, Path]) -> None:
    one, two = (TextTokenizer.load(path) for path in forms)
    assert len(TEXTS) >= 50 and one.encode("hello", True) != one.encode("hell", True)
    for text in TEXTS:
        for special in (True, False):
            assert one.encode(text, special) == two.encode(text, special), repr(text)
        assert one.decode(two.encode(text, False), skip_special_tokens=False) == text
    assert encode_chat(one, CHAT) == encode_chat(two, CHAT)
    assert one.eos_token_ids == two.eos_token_ids == {EOS, EOT}
    prompts = [ids for text in TEXTS[::4] if (ids := one.encode(text, True))] + [encode_chat(one, CHAT)]
    # Biased towards its ends, so that a random model reaches one.
    options = {"stop_token_ids": one.eos_token_ids, "logit_bias": ((EOS, 2.5), (EOT, 2.5))}
    asked = [request(f"r{i}", prompt, 20, **options) for i, prompt in enumerate(prompts)]
    engines = [RealEngine(path, blocks=64, budget=32) for path in forms]
    assert engines[0].run(*asked) == engines[1].run(*asked)
    ends = [[seq.finish_reason for seq in engine.sequences.values()] for engine in engines]
    assert ends[0] == ends[1] and {FinishReason.STOP, FinishReason.LENGTH} == set(ends[0])
