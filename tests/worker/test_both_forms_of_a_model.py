"""A GGUF file and a directory with safetensors of one model: equal token ids, equal answers, equal ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_engine import RealEngine, request
from tiny_models import tiny, write_gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from kvhive.router.request import ChatMessage
from kvhive.router.tokenizer import TextTokenizer
from kvhive.worker.sequence import FinishReason

SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|end|>"]
BOS, EOS, EOT = 0, 3, 2
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2", "12 3"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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


def words() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def save_tokenizer(directory: Path, pre: str) -> None:
    """What a model of this kind has beside its safetensors."""
    vocabulary = {word: index for index, word in enumerate(words())}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    if pre == "llama-bpe":
        split = pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))


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
    assert one.encode_chat(CHAT) == two.encode_chat(CHAT)
    assert one.eos_token_ids == two.eos_token_ids == {EOS, EOT}
    prompts = [ids for text in TEXTS[::4] if (ids := one.encode(text, True))] + [one.encode_chat(CHAT)]
    # Biased towards its ends, so that a random model reaches one.
    options = {"stop_token_ids": one.eos_token_ids, "logit_bias": ((EOS, 3.0), (EOT, 3.0))}
    asked = [request(f"r{i}", prompt, 20, **options) for i, prompt in enumerate(prompts)]
    engines = [RealEngine(path, blocks=64, budget=32) for path in forms]
    assert engines[0].run(*asked) == engines[1].run(*asked)
    ends = [[seq.finish_reason for seq in engine.sequences.values()] for engine in engines]
    assert ends[0] == ends[1] and {FinishReason.STOP, FinishReason.LENGTH} == set(ends[0])
