"""The corpus: whose licences pass, what is text, what is held out, and that two runs agree."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from samebit.core.errors import CheckpointError, ConfigError
from samebit.engine.model_source import resolve_model
from samebit.train import corpus
from samebit.train.command import prepare_corpus
from samebit.train.corpus import Package
from samebit.train.tokens import (
    DOCUMENT_START,
    SPECIAL_TOKENS,
    load_data,
    prepare,
    sentences,
    tokenizer_of,
    train_tokenizer,
)
from tests.train.conftest import PROSE, VOCAB, tiny_corpus

FEW = ("click", "packaging", "h11", "idna")


@pytest.mark.parametrize(
    ("licence", "is_fine"),
    [
        ("MIT", True),
        ("Apache-2.0 OR BSD-2-Clause", True),
        ("Python Software Foundation License", True),
        ("MIT-CMU", True),
        ("GPL-3.0-only", False),
        ("MIT AND LGPL-2.1", False),
        ("Mozilla Public License 2.0 (MPL 2.0)", False),
        ("MPL-2.0 AND MIT", False),
        ("NVIDIA Proprietary Software", False),
        ("", False),
        ("LIMITED", False),
    ],
)
def test_only_licences_that_are_permissive_in_all_parts_pass(licence, is_fine):
    assert corpus.is_permissive(licence) == is_fine


def test_two_collections_are_the_same_corpus():
    one, other = (corpus.collect(only=FEW, max_files=5) for _ in range(2))
    assert one.manifest() == other.manifest()
    assert one != corpus.collect(only=FEW, max_files=4)
    names = {p.name for p in (*one.train, *one.held_out)}
    assert names <= set(FEW)
    assert one.train
    assert one.held_out
    assert not {p.name for p in one.train} & {p.name for p in one.held_out}


def test_a_corpus_of_one_package_is_refused():
    with pytest.raises(ConfigError, match="1 packages"):
        corpus.collect(only=["click"])


def test_a_text_is_taken_once_however_it_is_spaced(tmp_path):
    body = "value = compute(1, 2)\n" * 20
    for name, text in (("a.py", body), ("b.py", body.replace("\n", "\n\n")), ("c.py", body + "more = 1\n")):
        (tmp_path / name).write_text(text)
    seen = set()
    taken = corpus._texts(sorted(tmp_path.iterdir()), seen, None)
    assert len(taken) == len(seen) == 2
    assert corpus._texts(sorted(tmp_path.iterdir()), seen, None) == ()


def package(name, *texts):
    return corpus.Package(name, "1", "MIT", texts)


def test_near_copies_of_held_out_files_are_dropped_and_others_stay():
    shared = "\n".join(f"the line {i} that both of the files have in common" for i in range(9))
    packages = [
        package("a", shared + "\nand one more line that is only here, of some length"),
        package("b", shared, "b itself says something else in its only long line"),
        package("c", "c has nothing to do with either of them, as one can see"),
    ]
    found = corpus._hold_out(packages)
    held = {p.name for p in found.held_out}
    kept = [text for p in found.train for text in p.texts]
    assert len(held) == 2
    assert found.num_near_copies == (1 if len(held & {"a", "b"}) == 1 else 0)
    assert (shared in kept) == held.isdisjoint({"a", "b"})


@given(st.binary(max_size=2000))
def test_cleaning_gives_text_without_tabs_carriage_returns_or_control_tokens(data):
    text = corpus.clean(data * 3)
    assert text is None or not any(mark in text for mark in ("\t", "\r\n", "<|"))


def test_leading_comments_go_and_code_stays():
    body = 'import os\n\n# kept\nVALUE = "' + "x" * 60 + '"\n'
    cleaned = corpus.clean(("# licence\n#\n\n" + body * 3).encode())
    assert cleaned == body * 3
    assert corpus.clean(b"1234567890" * 100) is None
    assert corpus.clean(b"print('<|endoftext|>')\n" * 20) is None


def test_streams_decode_to_the_corpus_and_begin_documents_with_the_start_token(data, corpus_folder):
    texts = [text for p in tiny_corpus().train for text in p.texts]
    starts = np.flatnonzero(data.train == DOCUMENT_START)
    assert len(starts) == len(texts)
    documents = [part[1:].tolist() for part in np.split(data.train, starts[1:])]
    assert [data.tokenizer.decode(ids) for ids in documents] == texts
    manifest = json.loads((corpus_folder / "manifest.json").read_text())
    assert manifest["train_tokens"] == len(data.train)
    assert [p["name"] for p in manifest["held_out"]] == ["gamma"]
    assert set(data.sentences) <= set(PROSE)
    assert data.sentences


def test_the_tokenizer_puts_message_tokens_first_and_splits_numbers(data):
    assert [data.tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == list(range(16))
    assert data.tokenizer.get_vocab_size() == VOCAB
    assert data.tokenizer.encode("4821").tokens == list("4821")


def test_the_budget_thins_whole_files(tmp_path):
    prepare(tiny_corpus(), [], tmp_path / "all", vocab_size=300, max_tokens=10**6)
    whole = load_data(tmp_path / "all").train
    prepare(tiny_corpus(), [], tmp_path / "half", vocab_size=300, max_tokens=len(whole) // 2)
    half = load_data(tmp_path / "half").train
    assert 0.3 * len(whole) < len(half) <= len(whole) // 2
    parts = {part.tobytes() for part in np.split(whole, np.flatnonzero(whole == 0))}
    assert all(part.tobytes() in parts for part in np.split(half, np.flatnonzero(half == 0)))


def test_a_corpus_is_written_in_the_tokens_of_a_model(tmp_path, corpus_folder):
    """As drafters need it whose target was trained on a corpus that is gone."""
    own = tokenizer_of(corpus_folder)
    prepare(tiny_corpus(), [], tmp_path, vocab_size=300, max_tokens=10**6, tokenizer=own)
    found = load_data(tmp_path)
    assert found.tokenizer.get_vocab() == own.get_vocab()
    assert np.array_equal(found.train, load_data(corpus_folder).train)
    assert json.loads((tmp_path / "manifest.json").read_text())["vocab_size"] == VOCAB


def test_the_command_takes_the_tokenizer_of_a_model(tmp_path):
    prepare_corpus(tmp_path, [], FEW, 2, 10**5, "toy", "nano")
    assert load_data(tmp_path).tokenizer.get_vocab() == tokenizer_of(resolve_model("nano")).get_vocab()


def test_a_tokenizer_of_more_tokens_than_a_stream_can_name_is_refused(tmp_path):
    words = [*SPECIAL_TOKENS, *(f"w{number}" for number in range(1 << 16))]
    vocab = {word: number for number, word in enumerate(words)}
    Tokenizer(models.WordLevel(vocab, unk_token=words[0])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="its tokenizer has 65552 tokens, more than the 65536 of a stream"):
        tokenizer_of(tmp_path)


def test_a_tokenizer_without_message_tokens_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json that can be read"):
        tokenizer_of(tmp_path)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"token 0 of its tokenizer is 'a', not '<\|endoftext\|>'"):
        tokenizer_of(tmp_path)


def test_sentences_are_whole_ones_of_docstrings_and_none_runs_over_a_heading():
    whole = "A file is closed when the last of its readers has gone away, e.g. at the end."
    text = (
        f'def close():\n    """{whole} Short one.\n\n    Returns\n    -------\n    Nothing that a caller may use in any way at all.'
        '\n\n    A heading without an end\n\n    The next\n    paragraph has a sentence of its own to tell.\n    """\n'
    )
    found = sentences(
        [Package("p", "1", "MIT", (text, 'x = "This is no docstring but a value that a name is given."\n'))]
    )
    assert set(found) == {whole, "The next paragraph has a sentence of its own to tell."}


def test_text_that_is_too_short_for_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=4096"):
        train_tokenizer(["short"], 4096)


def test_a_folder_that_holds_no_corpus_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_data(tmp_path)
    (tmp_path / "manifest.json").write_text('{"held_out_bytes_per_token": 3}')
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["abc"], 272).to_str())
    with pytest.raises(ConfigError, match="not a prepared corpus"):
        load_data(tmp_path)
