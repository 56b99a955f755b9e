"""Laws of the tokenizer, over the ways in which model families build theirs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from gateway_fakes import PLAIN_TEMPLATE
from hypothesis import given
from hypothesis import strategies as st

from pd_service.errors import ConfigError, InvalidRequest
from pd_service.gateway.tokenizer import Tokenizer
from pd_service.request import ChatMessage
from tests.tokenizer_families import (
    BEGIN,
    END,
    FAMILIES,
    PIECES,
    THINK,
    TOOL,
    byte_ids,
    encode,
    family_tokenizer,
    token_id,
)

CHAT = [ChatMessage(role="user", content="ab")]
WITH_BYTES = [family for family in FAMILIES if family != "metaspace"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {family: family_tokenizer(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def encode_chat(tokenizer: Tokenizer, content: str = "ab") -> list[int]:
    return asyncio.run(tokenizer.encode_chat([ChatMessage(role="user", content=content)]))


# There and back


@pytest.mark.parametrize("family", WITH_BYTES)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_every_text_comes_back(tokenizers: dict[str, Tokenizer], family: str, text: str) -> None:
    tokenizer = tokenizers[family]
    added = " " if family == "llama2" and text and text[0] != " " else ""  # before each text, by its definition
    assert tokenizer.decode(encode(tokenizer, text)) == added + text


PART = st.sampled_from([*PIECES, THINK, TOOL, END])


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), parts=st.lists(PART, max_size=20))
def test_text_is_what_the_familys_own_decoder_makes_of_it_behind_other_text(
    tokenizers: dict[str, Tokenizer], family: str, data: st.DataObject, parts: list[str]
) -> None:
    """Ids in any order; where the family has bytes as tokens, whole characters of them too."""
    tokenizer = tokenizers[family]
    token_ids = [token_id(tokenizer, part) for part in parts]
    if family in WITH_BYTES:
        position = data.draw(st.integers(0, len(token_ids)))
        token_ids[position:position] = byte_ids(tokenizer, data.draw(st.sampled_from(["é", "日本", "🙂"])).encode())
    if family == "gemma":
        token_ids.append(data.draw(st.sampled_from([token_id(tokenizer, piece) for piece in ("▁▁▁", "\n\n")])))
    word = token_id(tokenizer, "a")
    whole = tokenizer._backend.decode([word, *token_ids], skip_special_tokens=True)
    assert "a" + tokenizer.decode(token_ids) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_added_tokens_are_one_token_whatever_stands_beside_them(tokenizers: dict[str, Tokenizer], family: str) -> None:
    tokenizer = tokenizers[family]
    for added in (THINK, TOOL):
        token_ids = encode(tokenizer, f"ab{added}ab b{added}")
        assert token_ids.count(token_id(tokenizer, added)) == 2
        assert token_ids[-1] == token_id(tokenizer, added)


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_have_no_text_and_other_added_ones_have_theirs(
    tokenizers: dict[str, Tokenizer], family: str
) -> None:
    tokenizer = tokenizers[family]
    ids = [token_id(tokenizer, piece) for piece in (BEGIN, THINK, "a", TOOL, END)]
    assert tokenizer.decode([*ids, 10**6]) == THINK + "a"
    assert list(map(tokenizer.token_text, ids)) == [BEGIN, THINK, "a", TOOL, END]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizers_own_end_token_is_known(tokenizers: dict[str, Tokenizer], family: str) -> None:
    assert tokenizers[family].end_token_ids == {token_id(tokenizers[family], END)}


# The begin token

TEMPLATES = {
    "written": "{{ bos_token }}" + PLAIN_TEMPLATE,
    "written behind a line break": "\n{{ bos_token }}" + PLAIN_TEMPLATE,
    "written twice": "{{ bos_token }}{{ bos_token }}" + PLAIN_TEMPLATE,
    "left to the tokenizer": PLAIN_TEMPLATE,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_has_exactly_one_begin_token(tmp_path: Path, family: str, template: str) -> None:
    tokenizer = family_tokenizer(family, tmp_path, template=template)
    token_ids = encode_chat(tokenizer)
    assert token_ids.count(token_id(tokenizer, BEGIN)) == 1
    assert template.startswith("\n") or token_ids[0] == token_id(tokenizer, BEGIN)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["ab", BEGIN + "ab", BEGIN + BEGIN + "ab", " ab", BEGIN])
def test_raw_text_has_exactly_one_begin_token(tokenizers: dict[str, Tokenizer], family: str, text: str) -> None:
    tokenizer = tokenizers[family]
    token_ids = asyncio.run(tokenizer.encode_text(text))
    assert token_ids[0] == token_id(tokenizer, BEGIN)
    assert token_ids.count(token_id(tokenizer, BEGIN)) == 1


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_tokenizer_that_adds_no_begin_token_leaves_it_to_the_template(tmp_path: Path, template: str) -> None:
    tokenizer = family_tokenizer("byte_level", tmp_path, begins_with="", template=template)
    begin = token_id(tokenizer, BEGIN)
    assert begin not in asyncio.run(tokenizer.encode_text("ab"))
    assert encode_chat(tokenizer).count(begin) == template.count("bos_token")


def test_several_tokens_before_each_text_stand_there_once(tmp_path: Path) -> None:
    """As GLM's tokenizers have two; the template writes them out, and a client may."""
    prefix = BEGIN + TOOL
    tokenizer = family_tokenizer("byte_level", tmp_path, begins_with=prefix, template=prefix + PLAIN_TEMPLATE)
    ids = [token_id(tokenizer, BEGIN), token_id(tokenizer, TOOL)]
    for token_ids in (
        asyncio.run(tokenizer.encode_text("ab")),
        asyncio.run(tokenizer.encode_text(prefix + "ab")),
        encode_chat(tokenizer),
    ):
        assert token_ids[:2] == ids
        assert not set(ids).intersection(token_ids[2:])


# Chat templates


def test_a_chat_ends_where_the_assistant_begins(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("byte_level", tmp_path, template=PLAIN_TEMPLATE)
    assert tokenizer.decode(encode_chat(tokenizer)) == "[user]ab[assistant]"


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_template_is_found_wherever_the_family_keeps_it(tmp_path: Path, place: str) -> None:
    family_tokenizer("byte_level", tmp_path, template=None)
    path = tmp_path / place
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": PLAIN_TEMPLATE}
    path.write_text(PLAIN_TEMPLATE if path.suffix == ".jinja" else json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(encode_chat(tokenizer)) == "[user]ab[assistant]"


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    templates = {"default": PLAIN_TEMPLATE, "rag": "{{ messages[0].content }}"}
    tokenizer = family_tokenizer("byte_level", tmp_path, template=templates)
    assert (tmp_path / "additional_chat_templates" / "rag.jinja").is_file()
    assert tokenizer.decode(encode_chat(tokenizer)) == "[user]ab[assistant]"


def test_chat_without_a_template_is_refused_with_the_models_name(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("byte_level", tmp_path / "plain-model", template=None)
    with pytest.raises(InvalidRequest, match="plain-model") as caught:
        encode_chat(tokenizer)
    assert caught.value.field == "messages"


REFUSING = [PLAIN_TEMPLATE, "{{ messages[0].content.missing.deeper }}", "{{ 1 / 0 }}", "{{ [][1] + 1 }}"]


@pytest.mark.parametrize("template", REFUSING)
def test_what_the_template_cannot_render_is_the_clients_error(tmp_path: Path, template: str) -> None:
    tokenizer = family_tokenizer("byte_level", tmp_path, template=template)
    with pytest.raises(InvalidRequest, match="the chat template refuses them") as caught:
        asyncio.run(tokenizer.encode_chat([ChatMessage(role="robot", content="")]))
    assert caught.value.field == "messages"


def test_text_that_is_not_unicode_is_the_clients_error(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        asyncio.run(tokenizers["byte_level"].encode_text("a\ud800"))


def test_a_directory_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer(tmp_path)
