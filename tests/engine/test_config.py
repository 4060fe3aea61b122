"""Engine settings that are refused before anything is built."""

import pytest

from samebit.core.config import EngineConfig, Schedule
from samebit.core.errors import ConfigError


@pytest.mark.parametrize(
    "field",
    [
        {"chunk_sizes": (16, 0)},
        {"preempt_percent": -1},
        {"preempt_percent": 101},
        {"spoil_percent": -1},
        {"spoil_percent": 101},
        {"max_rows": -1},
        {"pad_tokens": -1},
        {"pad_rows": -1},
    ],
)
def test_a_schedule_that_no_step_can_follow_is_refused(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        EngineConfig(schedule=Schedule(**field)).validate()
