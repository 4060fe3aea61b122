import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.errors import CheckpointError, InvalidRequestError
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer
from tests.strategies import texts

TOKENIZER = Tokenizer(resolve_model("nano"))
MARKERS = sorted(TOKENIZER.special_tokens())


@given(st.lists(st.sampled_from(MARKERS) | texts).map("".join))
def test_text_survives_a_round_trip_whatever_it_spells(text):
    ids = TOKENIZER.encode(text, allow_special=False)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.special_ids.isdisjoint(ids)


def test_a_spelled_marker_is_a_control_token_only_where_allowed(tokenizer):
    assert tokenizer.encode("<|end_message|>", allow_special=True) == [8]
    assert 8 not in tokenizer.encode("<|end_message|>", allow_special=False)


def test_control_tokens_are_shown_only_when_asked_for(tokenizer):
    ids = tokenizer.encode("a<|end_message|>b", allow_special=True)
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end_message|>b"


def test_every_byte_has_a_token(tokenizer):
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_decoding_agrees_with_the_tokenizers_library(tokenizer, nano_folder):
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(nano_folder / "tokenizer.json"))
    for start in range(0, tokenizer.vocab_size, 7):
        ids = [(start * 31 + 977 * i) % tokenizer.vocab_size for i in range(40)]
        assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("token_id", [-1, 4096, 10**9])
def test_an_id_without_a_token_stands_for_no_text(tokenizer, token_id):
    ids = tokenizer.encode("a b", allow_special=False)
    assert tokenizer.decode([ids[0], token_id, *ids[1:]]) == "a b"


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(InvalidRequestError, match=r"U\+D83D at character 2"):
        tokenizer.encode("ab\ud83d", allow_special=False)


def test_names_and_ids_of_tokens_agree(tokenizer):
    assert tokenizer.id_of("<|content_model_end_sampling|>") == 6
    assert tokenizer.id_of("no such token") is None
    assert tokenizer.named_tokens["eos_token"] == "<|content_model_end_sampling|>"
    assert tokenizer.token_text(tokenizer.encode("é", allow_special=False)[0]) in ("é", "\ufffd")


def test_a_control_token_in_the_ordinary_vocabulary_is_never_encoded_from_text(tmp_path):
    document = json.loads((resolve_model("nano") / "tokenizer.json").read_text())
    document["model"]["ignore_merges"] = True
    document["pre_tokenizer"] = document["pre_tokenizer"]["pretokenizers"][1]  # no split into words
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InvalidRequestError, match="control token"):
        Tokenizer(tmp_path).encode("<|end_message|>", allow_special=False)


@pytest.mark.parametrize(("content", "reason"), [(None, "no tokenizer.json"), ("{", "not a readable tokenizer")])
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=reason):
        Tokenizer(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path, nano_folder):
    shutil.copy(nano_folder / "tokenizer.json", tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer(tmp_path)


def test_a_tokenizer_configuration_that_is_no_object_is_refused(tmp_path, nano_folder):
    shutil.copy(nano_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="JSON object"):
        Tokenizer(tmp_path)
