"""The documentation names every setting, field, flag, endpoint and metric, and links lead somewhere."""

import re
from pathlib import Path
from typing import get_args

import pytest
import typer.main

from samebit import EngineConfig, SamplingParams
from samebit.bench.api import BACKENDS
from samebit.bench.datasets import DATASETS
from samebit.bench.summary import METRICS
from samebit.cli import app
from samebit.cli.aliases import FIXED, RENAMED, REPLACED
from samebit.core.request import MissReason
from samebit.engine.metrics import ServerMetrics
from samebit.server.app import create_app
from samebit.server.body import NEUTRAL
from samebit.server.operations_models import AbortBody, WeightsBody
from samebit.server.request_models import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
)
from samebit.server.responses_body import InputMessage, ResponsesBody
from samebit.server.service import Service

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMANDS = typer.main.get_command(app).commands


def words(page):
    """Everything in code quotes on a page, and the words in it."""
    quoted = set(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text()))
    return quoted | {word for text in quoted for word in re.split(r"[\s,=./()]+", text)}


def flags(command):
    params = [p for p in COMMANDS[command].params if p.param_type_name == "option"]
    return {flag for p in params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")} - {"--help"}


def test_every_flag_of_serve_is_in_the_table():
    assert len(flags("serve")) > 15
    assert flags("serve") - words("serving.md") == set()


def test_every_flag_of_generate_and_chat_is_told():
    shown = words("offline.md") | {"--max-tokens", "--input", "--output"}
    assert (flags("generate") | flags("chat")) - shown == set()


def test_every_flag_beside_a_server_and_of_other_servers_is_told():
    told = words("operations.md")
    assert (flags("run-batch") | flags("top") | flags("env")) - told == set()
    assert {*RENAMED, *REPLACED, *FIXED} - told == set()


def test_every_reason_of_a_miss_is_told():
    assert set(get_args(MissReason)) - words("operations.md") == set()


def flags_of_benchmarks():
    params = [p for name, one in COMMANDS["bench"].commands.items() if name != "recall" for p in one.params]
    return {flag for p in params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")} - {"--help"}


def test_every_flag_of_benchmarks_and_no_other_is_told():
    assert len(flags_of_benchmarks()) > 40
    assert flags_of_benchmarks() - words("benchmarks.md") == set()
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / "benchmarks.md").read_text()))
    assert told - flags_of_benchmarks() == set()


def test_every_data_set_backend_and_metric_is_told():
    assert {*DATASETS, *BACKENDS, *METRICS} - words("benchmarks.md") == set()


def test_no_flag_is_told_that_does_not_exist():
    real = {*RENAMED, *REPLACED, *FIXED}.union(*(flags(command) for command in COMMANDS))
    for page in ("serving.md", "operations.md", "security.md", "offline.md", "quickstart.md"):
        told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / page).read_text()))
        assert told, page
        assert told - real == set(), page


@pytest.mark.parametrize(
    "model",
    [ChatBody, CompletionBody, ChatMessage, StreamOptions, ResponsesBody, InputMessage, TokenizeBody, DetokenizeBody],
)
def test_every_field_of_a_body_is_told(model):
    assert set(model.model_fields) - words("serving.md") == set()


@pytest.mark.parametrize("model", [AbortBody, WeightsBody])
def test_every_field_of_an_operator_is_told(model):
    assert set(model.model_fields) - words("serving.md") - words("operations.md") == set()


def test_every_field_that_is_only_accepted_empty_is_told():
    assert set(NEUTRAL) - words("serving.md") == set()


@pytest.mark.parametrize("struct", [EngineConfig, SamplingParams])
def test_every_setting_and_its_default_is_told(struct):
    assert set(struct.__struct_fields__) - words("offline.md") == set()


def test_every_metric_is_told():
    told = words("serving.md")
    metrics = ServerMetrics("x")
    metrics.set_engine_stats({"num_accepted_tokens_at_0": 1, "misses_cold": 1}, 0.0)
    metrics.refuse("queue_full")
    names = {
        sample.name.removeprefix("samebit:")
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if not re.search(r"_(created|bucket|count|sum)$", sample.name)
    }
    families = {m.name.removeprefix("samebit:") for m in metrics.registry.collect() if m.type == "histogram"}
    assert len(names) > 20
    assert len(families) == 7
    assert (names | families) - told == set()


def test_every_endpoint_is_told():
    paths = set(create_app(Service(None, None, None, None, None, started=0, max_body_bytes=1)).openapi()["paths"])
    assert len(paths) > 5
    told = (DOCS / "serving.md").read_text()
    assert {path for path in paths if f" {path}`" not in told} == set()


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))])
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        # The examples and README are tested without the tree around them, too.
        if (path.parent / target).resolve().is_relative_to(DOCS):
            assert (path.parent / target).is_file(), target
