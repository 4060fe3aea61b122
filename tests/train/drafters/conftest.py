"""A toy target with a few steps of training, as a folder, and drafters trained for it by the command."""

import time
from types import SimpleNamespace

import pytest
import torch

from samebit.train.drafters.command import train_drafters
from samebit.train.export import export
from samebit.train.feed import Feed
from samebit.train.loop import Trainer
from samebit.train.recipe import RECIPES
from samebit.train.writers import OwnWriter

TOY = RECIPES["toy"]
CPU = torch.device("cpu")
METHODS = ("dflash", "dspark", "mtp")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target_folder(corpus_folder, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    trainer = Trainer(TOY, folder / "run", CPU)
    source = OwnWriter(data, length=64, seed=1)
    feed = Feed(data, source, length=64, rows=8, dialogue_share=0.25, seed=1, device=CPU, ring_rows=64)
    for _ in range(25):
        trainer.step(feed.batch(), 1.0)
    export(trainer.model, corpus_folder, folder / "toy", [])
    return folder / "toy"


@pytest.fixture(scope="session")
def trained(corpus_folder, target_folder, tmp_path_factory):
    """What one run of all methods left."""
    run = tmp_path_factory.mktemp("drafters")
    began = time.monotonic()
    train_drafters(
        str(target_folder),
        corpus_folder,
        run,
        METHODS,
        "toy",
        seconds=None,
        own_share=None,
        start=None,
        workers=0,
        seed=0,
    )
    models = {method: run / method / "model" for method in METHODS}
    return SimpleNamespace(run=run, models=models, seconds=time.monotonic() - began)
