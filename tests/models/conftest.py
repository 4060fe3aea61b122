"""Fixtures: a tiny model, and a fresh copy of its checkpoint that a test may break."""

from __future__ import annotations

import shutil

import pytest
import torch

from samebit.kernels.selection import select_kernels
from samebit.models.base import load_model
from tests.models import tiny


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers():
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def load(kernel_kind):
    """Load a folder with the kernels under test."""
    kernels = select_kernels(kernel_kind, num_threads=1)
    return lambda folder: load_model(folder, kernels, torch.device("cpu"))


@pytest.fixture(scope="session")
def mixed_model():
    return tiny.tiny_model()


@pytest.fixture(scope="session")
def pristine(mixed_model, tmp_path_factory):
    """The mixed model in the published spelling; not to be changed."""
    folder = tmp_path_factory.mktemp("pristine")
    tiny.save_published(mixed_model, folder)
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy of the published checkpoint to break."""
    return shutil.copytree(pristine, tmp_path / "model")
