"""Words are found again where they mean the same; how many are kept is bounded."""

from __future__ import annotations

from kvhive.router.known_words import MAX_NEW_WORDS, MAX_WORD_CHARS, KnownWords


def learn(words: KnownWords, text: str) -> None:
    pieces = words.look_up(text)
    words.learn(pieces, {piece: piece.encode() for piece in pieces if isinstance(piece, str)})


def test_known_words_are_found_inside_first_and_last() -> None:
    words = KnownWords()
    assert words.look_up("a b c d") == ["a", " b", " c", " d"]
    learn(words, "a b c d")
    assert words.look_up("a c b c d") == [b"a", b" c b c", b" d"]
    assert words.look_up("b a c") == ["b", " a", " c"]


def test_what_ends_invisibly_goes_on_to_where_it_may_be_cut() -> None:
    words = KnownWords()
    assert words.look_up("a\n b  c \t") == ["a\n b", "  c", " \t"]
    learn(words, "a\n b  c \t")
    assert words.look_up("a\n b  c \t") == [b"a\n b", b"  c", b" \t"]
    assert words.look_up("a\n b \t c") == [b"a\n b", " \t c"]


def test_after_so_many_new_words_the_rest_is_one_piece() -> None:
    assert KnownWords().look_up("a b c d e", most_new=2) == ["a", " b", " c d e"]
    assert KnownWords().look_up("a b", most_new=0) == ["a b"]


def test_words_are_bounded_in_number_and_length() -> None:
    words = KnownWords(max_words=300)
    for start in range(0, 4000, 200):
        learn(words, " ".join(map(str, range(start, start + 200))))
        assert 200 <= len(words) <= 300
    before = len(words)
    learn(words, " ".join(letter * (MAX_WORD_CHARS + 1) for letter in "abc"))
    assert len(words) == before
    assert MAX_NEW_WORDS <= 300
