"""A tiny prepared corpus that the tests of this folder share."""

import pytest

from samebit.train.corpus import Corpus, Package
from samebit.train.dialogues import talk
from samebit.train.tokens import load_data, prepare
from samebit.workloads import document

PROSE = [f"This sentence number {i} says that the reader of a file may close it twice." for i in range(40)]
VOCAB = 640


def tiny_corpus():
    def package(name, seeds):
        heads = [f'"""{PROSE[seed % 40]} {PROSE[(seed + 1) % 40]}"""\n\n' for seed in seeds]
        return Package(
            name, "1.0", "MIT", tuple(h + document(seed, 3000) for h, seed in zip(heads, seeds, strict=True))
        )

    return Corpus((package("alpha", range(8)), package("beta", range(8, 16))), (package("gamma", range(16, 20)),), 0)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    said = [talk(seed, PROSE) for seed in range(20)]
    prepare(tiny_corpus(), said, folder, vocab_size=VOCAB, max_tokens=10**6)
    return folder


@pytest.fixture(scope="session")
def data(corpus_folder):
    return load_data(corpus_folder)
