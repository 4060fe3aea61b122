"""A small random model, and audits of it that take a second."""

import pytest

from samebit.audit.prompts import builtin_prompts
from samebit.audit.scenarios import Scenario
from samebit.audit.white_box import audit_model
from samebit.core.config import EngineConfig
from tests.random_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("audited"), depths=2))


@pytest.fixture(scope="session")
def audit_small(small_model):
    """Audit the small model with an engine of the caller's making, in the scenarios that are named."""

    def run(*names, page_size=4, speculative_config=None, **fields):
        config = EngineConfig(
            model=small_model,
            num_threads=1,
            page_size=page_size,
            speculative_config=speculative_config,
            max_num_seqs=8,
            num_pages=200,
            num_window_pages=200,
            num_checkpoints=60,
        )
        axes = [dict(zip(Scenario.__struct_fields__, name.split("/"), strict=False)) for name in names]
        scenarios = [Scenario(**each) for each in axes] if names else None
        return audit_model(
            config,
            lambda engine: builtin_prompts(engine, count=6, max_tokens=14, seed=3),
            seed=5,
            scenarios=scenarios,
            **fields,
        )

    return run
