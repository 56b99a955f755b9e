"""Laws of streamed text, over the families' tokenizers: what is sent is certain, and all of it is the decoded whole.

The first token of an answer comes from the prefill engine and the others from the decode engine; the text knows
nothing of that, so every law is tried with every cut of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateway_fakes import FakeStory, collect, end, make_generation, outcomes, tokens
from hypothesis import given
from hypothesis import strategies as st

from pd_service.gateway.detokenizer import IncrementalDetokenizer
from pd_service.gateway.generation import GenerationDelta, GenerationFinish
from pd_service.gateway.intake import ClientRequest, TokenPrompt, sampling_params
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import FinishReason
from tests.one_loop import run_async
from tests.tokenizer_families import FAMILIES, THINK, TOOL, byte_ids, encode, family_tokenizer, token_id

WITH_BYTES = [family for family in FAMILIES if family != "metaspace"]
# Beginnings and ends of characters of two to four bytes, letters, and bytes that no character has.
SOME_BYTES = st.lists(st.sampled_from(b"A\xc3\xa9\xe4\xbd\xa0\xf0\x9f\x99\x82\xff\xed"), max_size=16).map(bytes)
TOKEN_IDS = st.lists(st.integers(0, 300), max_size=24)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {family: family_tokenizer(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def cuts(data: st.DataObject, token_ids: list[int]) -> Iterator[list[int]]:
    """The tokens in steps of any size, none empty."""
    rest = token_ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        yield rest[:count]
        rest = rest[count:]


# Without stop strings


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), token_ids=TOKEN_IDS)
def test_all_deltas_together_are_the_decoded_whole(
    tokenizers: dict[str, Tokenizer], family: str, data: st.DataObject, token_ids: list[int]
) -> None:
    """Any ids, special and unknown ones and broken characters among them; no part that was sent is ever taken back."""
    tokenizer = tokenizers[family]
    whole = tokenizer.decode(token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    sent = ""
    for step in cuts(data, token_ids):
        sent += detokenizer.push(step)
        assert whole.startswith(sent)
    assert sent + detokenizer.flush() == whole
    assert detokenizer.num_tokens == len(token_ids)


@pytest.mark.parametrize("family", WITH_BYTES)
@given(raw=SOME_BYTES)
def test_any_bytes_stream_as_they_decode(tokenizers: dict[str, Tokenizer], family: str, raw: bytes) -> None:
    tokenizer = tokenizers[family]
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push([one]) for one in byte_ids(tokenizer, raw))
    assert text + detokenizer.flush() == raw.decode(errors="replace")


@pytest.mark.parametrize("family", WITH_BYTES)
@given(text=st.text())
def test_no_part_of_a_character_is_sent_and_no_whole_one_kept(
    tokenizers: dict[str, Tokenizer], family: str, text: str
) -> None:
    tokenizer = tokenizers[family]
    detokenizer = IncrementalDetokenizer(tokenizer)
    sent = ""
    for count, one in enumerate(byte_ids(tokenizer, text.encode()), start=1):
        sent += detokenizer.push([one])
        assert sent == text.encode()[:count].decode(errors="ignore")


@pytest.mark.parametrize("family", WITH_BYTES)
def test_a_broken_character_is_replaced_as_soon_as_it_is_known_to_be_broken(
    tokenizers: dict[str, Tokenizer], family: str
) -> None:
    first, letter = byte_ids(tokenizers[family], b"\xe4A")
    detokenizer = IncrementalDetokenizer(tokenizers[family])
    assert [detokenizer.push([first]), detokenizer.push([letter]), detokenizer.push([first])] == ["", "\ufffdA", ""]
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


def test_a_character_may_begin_in_a_piece_and_end_in_a_byte(tokenizers: dict[str, Tokenizer]) -> None:
    """A byte-level piece of two bytes, then the third."""
    tokenizer = tokenizers["byte_level"]
    piece, last = encode(tokenizer, "日")
    assert tokenizer.token_bytes(piece) == "日".encode()[:2]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([piece]), detokenizer.push([last])] == ["", "日"]


@pytest.mark.parametrize("family", FAMILIES)
def test_spaces_survive_wherever_the_answer_is_cut(tokenizers: dict[str, Tokenizer], family: str) -> None:
    """As its first token, as the first of the decode engine, repeated, behind special tokens, and at the end."""
    tokenizer = tokenizers[family]
    pieces = [" a", " ab", " ", " ", TOOL, " b", "a", THINK, " "]
    detokenizer = IncrementalDetokenizer(tokenizer)
    sent = [detokenizer.push([token_id(tokenizer, piece)]) for piece in pieces]
    assert sent == ["" if piece == TOOL else piece for piece in pieces]


# With stop strings

AB_TEXT = st.text("ab", max_size=24)
AB_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(begin, end) of the stop string that ends first, the longest of these, by trying every end."""
    for stop_end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:stop_end].endswith(stop)]
        if lengths:
            return stop_end - max(lengths), stop_end
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    lengths = range(len(text) + 1)
    return max(n for n in lengths if n == 0 or any(stop.startswith(text[-n:]) for stop in stops))


@given(text=AB_TEXT, stops=AB_STOPS)
def test_held_back_is_exactly_what_can_become_a_stop_string(
    tokenizers: dict[str, Tokenizer], text: str, stops: list[str]
) -> None:
    tokenizer = tokenizers["llama2"]
    detokenizer = IncrementalDetokenizer(tokenizer, stops)
    found = first_stop(text, stops)
    sent = ""
    for count, one in enumerate(byte_ids(tokenizer, text.encode()), start=1):
        sent += detokenizer.push([one])
        seen = text[:count]
        if found and count >= found[1]:
            assert (detokenizer.stopped, sent) == (True, text[: found[0]])
        else:
            assert (detokenizer.stopped, sent) == (False, seen[: count - longest_beginning(seen, stops)])
    assert sent + detokenizer.flush() == (text[: found[0]] if found else text)
    assert detokenizer.num_tokens == (found[1] if found else len(text))


def test_a_stop_string_inside_one_token_ends_the_answer_within_it(tokenizers: dict[str, Tokenizer]) -> None:
    think = token_id(tokenizers["gemma"], THINK)
    detokenizer = IncrementalDetokenizer(tokenizers["gemma"], ["hin"])
    assert detokenizer.push([think, think]) == "<t"
    assert (detokenizer.stopped, detokenizer.num_tokens, detokenizer.flush()) == (True, 1, "")


STOP_TEXT = st.text("ab é日", min_size=1, max_size=5)


def any_tokenization(data: st.DataObject, tokenizer: Tokenizer, family: str) -> list[int]:
    """Tokens that spell some text, not as the tokenizer itself would have cut it."""
    pieces = {piece: [token_id(tokenizer, piece)] for piece in ("a", "b", "ab", " a", " ab", " ", TOOL)}
    if family in WITH_BYTES:
        pieces |= {text: byte_ids(tokenizer, text.encode()) for text in ("é", "日", "🙂")}
    chosen = data.draw(st.lists(st.sampled_from(list(pieces)), max_size=16))
    return [one for piece in chosen for one in pieces[piece]]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), stops=st.lists(STOP_TEXT, min_size=1, max_size=3))
def test_an_answer_ends_before_its_first_stop_string_however_it_was_cut(
    tokenizers: dict[str, Tokenizer], family: str, data: st.DataObject, stops: list[str]
) -> None:
    """Through the core of both doors: no part of the stop string is sent, and all text before it is."""
    tokenizer = tokenizers[family]
    token_ids = any_tokenization(data, tokenizer, family)
    text = tokenizer.decode(token_ids)
    if len(text) > 1 and data.draw(st.booleans()):  # one that does occur, over the edge of the first tokens
        begin = data.draw(st.integers(0, min(3, len(text) - 2)))
        stops = [text[begin : begin + data.draw(st.integers(1, 6))]]
    story = FakeStory(*(tokens(*step) for step in cuts(data, token_ids)), end())
    generation = make_generation(tokenizer, story)
    request = ClientRequest(prompt=TokenPrompt((5, 6)), sampling=sampling_params(stop=stops))
    *deltas, finish = run_async(collect(generation, request))
    assert isinstance(finish, GenerationFinish)
    found = first_stop(text, stops)
    expected = text[: found[0]] if found else text
    sent = [delta.text for delta in deltas if isinstance(delta, GenerationDelta)]
    assert "".join(sent) + finish.text == expected
    assert finish.reason is (FinishReason.STOP if found else FinishReason.LENGTH)
    answer = [one for delta in deltas if isinstance(delta, GenerationDelta) for one in delta.token_ids]
    assert answer == token_ids[: finish.num_output_tokens]
    if found:
        assert text[: found[1]] in tokenizer.decode(answer)
        assert text[: found[1]] not in tokenizer.decode(answer[:-1])
    assert outcomes(generation) == {"finished": 1}
