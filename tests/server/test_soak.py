"""Many clients at once, good and bad: nobody gets what is not theirs, nothing is held, and answers are those of solo runs."""

import pytest

from benchmarks.soak import run


@pytest.mark.parametrize(("connections", "seconds"), [(24, 4), pytest.param(1000, 600, marks=pytest.mark.slow)])
def test_good_clients_get_their_answers_whatever_bad_ones_do(connections, seconds):
    audited = 20 if seconds < 60 else 500
    record = run("nano", connections, seconds, audited)
    assert record["errors"] == {}
    assert record["held_at_the_end"] == {}
    assert (record["num_audited"], record["num_different"]) == (audited, 0)
    assert record["cached_tokens_of_answers"] > 0, "without a hit little is shown"
    assert min(record["counts"][kind] for kind in ("good", "leave", "abort", "bad")) > 0
    assert set(record["watched"].values()) == {0}
    assert record["exit_status"] == 0
    if seconds > 60:
        for name in ("http", "engine"):
            assert record["rss_mb_end"][name] < 1.1 * record["rss_mb_start"][name] + 50
