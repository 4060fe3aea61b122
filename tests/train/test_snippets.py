"""Functions that are cut in two for completion: where they end, and what a dialogue makes of them."""

import argparse
import ast
import inspect
import random
import re
import textwrap

import numpy as np
import pytest

from samebit.train.dialogues import DialogueWriter
from samebit.train.snippets import Snippets, function_end
from samebit.train.tokens import DOCUMENT_START, train_tokenizer

FUNCTIONS = (
    textwrap.wrap,
    textwrap.dedent,
    textwrap.shorten,
    textwrap.indent,
    textwrap.fill,
    inspect.getdoc,
    inspect.cleandoc,
)


@pytest.fixture(scope="module")
def source(data):
    """A tokenizer that has seen source code, and some as tokens."""
    texts = [inspect.getsource(module) for module in (textwrap, inspect, argparse)]
    tokenizer = train_tokenizer(texts, 1024)
    return tokenizer, np.array([i for t in texts for i in [DOCUMENT_START, *tokenizer.encode(t).ids]], dtype=np.uint16)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_function_ends_where_the_parser_ends_it(function):
    lines = inspect.getsource(inspect.getmodule(function)).split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"def {function.__name__}("))
    (parsed,) = (n for n in ast.parse("\n".join(lines)).body if getattr(n, "name", None) == function.__name__)
    assert begin + function_end(lines[begin:]) == parsed.end_lineno


def test_blank_lines_belong_to_no_end_and_a_closing_bracket_ends_nothing():
    lines = ["def f(", "    a,", "):", "    return a", "", "", "x = 1"]
    assert function_end(lines) == 4
    assert function_end(["    def f(self):", "        return 1", "", "    def g(self):"]) == 2
    assert function_end(["def f():", "    return 1", ""]) is None


@pytest.mark.parametrize("seed", range(20))
def test_head_and_rest_are_a_whole_function_of_the_stream(source, seed):
    tokenizer, stream = source
    found = Snippets(tokenizer, stream).draw(random.Random(seed))
    (function,) = ast.parse(f"{found.head}\n{found.rest}").body
    assert isinstance(function, ast.FunctionDef)
    assert function.name in tokenizer.decode(stream.tolist())
    assert 20 <= len(tokenizer.encode(found.rest).ids) <= 180
    assert found.rest.strip("\n") == found.rest
    assert found.head.strip("\n") == found.head


def test_a_snippet_is_the_true_text_without_its_indentation(source):
    tokenizer, stream = source
    lines = {line.strip() for line in tokenizer.decode(stream.tolist()).split("\n")}
    snippets = Snippets(tokenizer, stream)
    for seed in range(20):
        found = snippets.draw(random.Random(seed))
        assert found.head.startswith("def ")
        assert {line.strip() for line in f"{found.head}\n{found.rest}".split("\n")} <= lines


def test_a_stream_without_functions_gives_none(source):
    tokenizer, _ = source
    words = tokenizer.encode("nothing is defined here").ids
    assert Snippets(tokenizer, np.array(words, dtype=np.uint16)).draw(random.Random(0)) is None


def test_a_completion_is_fenced_and_stops(source, data):
    tokenizer, stream = source
    ids, _ = DialogueWriter(tokenizer, stream, data.sentences, 0, "train").dialogue(60_000)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    fence = r"```python\n((?:(?!```).)+)\n```<\|end_message\|>"
    turn = rf"{fence}<\|message_model\|><\|content_text\|>{fence}<\|content_model_end_sampling\|>"
    turns = re.findall(turn, text, re.DOTALL)
    assert turns
    for head, rest in turns:
        assert len(ast.parse(f"{head}\n{rest}").body) == 1
