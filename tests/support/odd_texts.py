"""Texts of what tokenizers trip over: white space of all kinds, marks, scripts, halves of special tokens."""

from __future__ import annotations

import random

FRAGMENTS = [
    *(
        " ",
        " ",
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\n\n",
        "\r\n",
        " \n ",
        "\x0b",
        "\x1c",
        "\x85",
        "\u00a0",
        "\u2003",
    ),
    *(
        "\u200b",
        "\u2028",
        "\u3000",
        "\ufeff",
        "a",
        "B",
        "hello",
        "world",
        "The",
        "ing",
        "don't",
        "WE'LL",
        "'s",
    ),
    *(
        "'",
        "'r",
        "e",
        "0",
        "7",
        "1234",
        "3.14",
        "²",
        "¼",
        "٣",
        ".",
        ",",
        "...",
        "!?",
        "/",
        "://",
        "_",
        "-",
        '"',
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "\u0308",
        "K",
        "Ω",
        "ß",
        "Привет",
        "мир",
        "שלום",
        "नमस्ते",
        "你好",
        "。",
        "한국",
    ),
    *(
        "\u1112\u1161\u11ab",
        "😀",
        "👩‍👧",
        "\U0010ffff",
        "\x00",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "|>",
        "<",
    ),
]


def odd_texts(count: int, seed: int = 1) -> list[str]:
    choices = random.Random(seed)
    return ["".join(choices.choices(FRAGMENTS, k=choices.randint(1, 60))) for _ in range(count)]
