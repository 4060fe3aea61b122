"""The bundled tokenizer and template, loaded once."""

from pathlib import Path

import pytest

from samebit.engine.chat_template import ChatTemplate, load_chat_template
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def nano_folder() -> Path:
    return resolve_model("nano")


@pytest.fixture(scope="session")
def tokenizer(nano_folder: Path) -> Tokenizer:
    return Tokenizer(nano_folder)


@pytest.fixture(scope="session")
def template(nano_folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    template = load_chat_template(nano_folder, tokenizer)
    assert template is not None
    return template
