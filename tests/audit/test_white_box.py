"""The white-box audit on a small random model: a sound engine passes, and each sabotaged one is found out."""

import math
import time

import msgspec
import pytest
import torch

from samebit.audit.drafts import DEFAULT
from samebit.audit.scenarios import CACHES, CHUNKS, COMPANIES, DRAFTS, EXECUTIONS, all_scenarios
from samebit.core.config import EngineConfig, Schedule, SpeculativeConfig
from samebit.engine.engine import Engine

COLD = "cold/solo/whole/eager"
HIT = "hit/solo/whole/eager"
BATCH = "cold/batch/whole/eager"
PREEMPTED = "cold/preempted/whole/eager"
GUESSED = "cold/solo/whole/eager/own"
TOLD = "cold/solo/whole/eager/told"


def is_reference(config):
    return config.checkpoint_interval == config.page_size


class Sabotaged(Engine):
    """An engine that is sound as the reference, and calls `spoil` after each step otherwise."""

    def __init__(self, config):
        super().__init__(config)
        self.is_sound = is_reference(config)
        self.pools = self._runner._pools
        self.spoiled = set()

    def step(self):
        outputs = super().step()
        return outputs if self.is_sound else self.spoil(outputs)

    def new_checkpoints(self):
        found = [c for c in self.manager.tree.checkpoints if c.tag not in self.spoiled]
        self.spoiled.update(c.tag for c in found)
        return found


class LosesConvRows(Sabotaged):
    """Checkpoints keep their tags, but the rows of one stream are zeros."""

    def spoil(self, outputs):
        for checkpoint in self.new_checkpoints():
            base = self.manager.geometry.snapshot_base(checkpoint.snapshot)
            stream = [stream.name for stream in self.manager.geometry.layout.streams].index("layers.0.attn")
            self.pools.conv[stream].rows[base : base + self.manager.geometry.layout.history] = 0
        return outputs


class FlipsOneKey(Sabotaged):
    """The lowest bit of one number in the second head of the full-attention layer's keys."""

    def spoil(self, outputs):
        for checkpoint in self.new_checkpoints():
            number = self.pools.kv[1][0].k[checkpoint.node.page, 1, 2, 5]
            number.copy_(torch.nextafter(number, torch.tensor(0.0)))
        return outputs


class SpoilsSiblings(Sabotaged):
    """The first key of what siblings have published, which the audited requests then resume from."""

    def spoil(self, outputs):
        for checkpoint in self.new_checkpoints():
            if any("siblings" in output.request_id for output in outputs):
                first_page = [*checkpoint.node.lineage()][-2].page
                self.pools.kv[1][0].k[first_page, 0, 0, 0] += 1
        return outputs


class BelievesGuesses(Engine):
    """One more guess is accepted than should be, where there is one."""

    def __init__(self, config, *drafter):
        super().__init__(config, *drafter)
        commit = self.scheduler.commit

        def believe(output):
            rows = zip(output.accepted, self.scheduler._flights[0].rows, strict=False)
            accepted = [min(count + 1, len(row.drafts)) for count, row in rows]
            return commit(msgspec.structs.replace(output, accepted=accepted))

        self.scheduler.commit = believe


class MixesNamespaces(Sabotaged):
    """Every request shares one cache."""

    def add(self, request):
        super().add(request if self.is_sound else msgspec.structs.replace(request, cache_salt=""))

    def spoil(self, outputs):
        return outputs


class DependsOnTheBatch(Sabotaged):
    """The first logprob of a step is the next number up where the step served others too."""

    def spoil(self, outputs):
        if len(outputs) < 2 or not outputs[0].logprobs:
            return outputs
        item, *rest = outputs[0].logprobs
        item = msgspec.structs.replace(item, logprob=math.nextafter(item.logprob, 0))
        return [msgspec.structs.replace(outputs[0], logprobs=[item, *rest]), *outputs[1:]]


class CountsARefusal(Sabotaged):
    def spoil(self, outputs):
        self.scheduler.counters.num_refused_checkpoints += 1
        return outputs


def forced(**changes):
    """Engines that ignore what a scenario asks of them."""

    def make(config: EngineConfig, *drafter) -> Engine:
        return Engine(config if is_reference(config) else msgspec.structs.replace(config, **changes), *drafter)

    return make


@pytest.fixture(scope="module")
def sound(audit_small):
    return audit_small()


def test_a_sound_engine_passes_in_every_scenario(sound):
    assert (sound.status, sound.mismatches, sound.problems, sound.first_difference) == (0, 0, [], None)
    plain = [result for result in sound.scenarios if result.axes["drafts"] == "none"]
    assert len(plain) == len(CACHES) * len(COMPANIES) * len(CHUNKS) * len(EXECUTIONS["cpu"]) == 54
    assert len(sound.scenarios) - len(plain) == len(EXECUTIONS["cpu"]) * (len(DRAFTS) - 1) * 4 == 16
    assert all(cell.observations for result in sound.scenarios for cell in result.cells)


def test_totals_are_the_sums_of_the_cells(sound):
    cells = [cell for result in sound.scenarios for cell in result.cells]
    assert sound.observations == sum(cell.observations for cell in cells)
    assert sound.observations == sum(result.counts.observations for result in sound.scenarios)
    assert sound.requests["hits"] == sum(cell.hits for cell in cells) > 0
    assert sound.positions == sum(cell.positions for cell in cells)
    # Every answer has 14 tokens; a hit scenario runs each prompt twice.
    assert sum(cell.runs for cell in cells) == 6 * (70 + 18 + 8)
    assert sound.positions >= 14 * sum(cell.runs for cell in cells)


def test_what_happened_is_what_the_scenario_says(sound):
    for result in sound.scenarios:
        hits, preempted, batched = (sum(getattr(c, n) for c in result.cells) for n in ("hits", "preempted", "batched"))
        assert (hits > 0) == (result.axes["cache"] == "hit")
        assert (preempted > 0) == (result.axes["company"] == "preempted")
        assert (batched > 0) == (result.axes["company"] != "solo")
        assert (result.counts.state_rows > 0) == (result.axes["cache"] != "off")
        guessed, accepted = (sum(getattr(c, n) for c in result.cells) for n in ("guessed", "accepted"))
        assert (guessed > 0) == (result.axes["drafts"] != "none")
        assert 0 < accepted < guessed or result.axes["drafts"] != "told"


def test_lost_conv_rows_are_found_in_the_state_and_in_the_answers_after_a_hit(audit_small):
    report = audit_small(COLD, HIT, make_engine=LosesConvRows)
    assert report.status == 1
    first = report.first_difference
    assert (first.layer, first.component) == ("layers.0", "attn convolution input")
    assert first.observed.startswith("0x0.0p+0")
    cold, hit = report.scenarios
    # A cold answer does not read what was published; one after a hit does.
    assert all(cell.first_difference.layer for cell in cold.cells if cell.mismatches)
    assert hit.counts.mismatches > cold.counts.mismatches > 0


def test_a_flipped_bit_of_a_key_is_named(audit_small):
    report = audit_small(COLD, make_engine=FlipsOneKey)
    first = report.first_difference
    assert (first.layer, first.component, first.element) == ("full #0", "k", 21)
    assert first.position % 4 == 2
    assert first.expected != first.observed


def test_a_rejected_guess_that_is_believed_is_found(audit_small):
    report = audit_small(TOLD, make_engine=BelievesGuesses)
    assert report.status == 1
    assert report.mismatches > 0


HEADS = SpeculativeConfig(method="mtp", token_cost=0.0)


class LosesDraftRows(Sabotaged):
    """Checkpoints keep their tags, but the rows of one stream of the drafter are zeros."""

    def spoil(self, outputs):
        for checkpoint in self.new_checkpoints():
            base = self.manager.geometry.snapshot_base(checkpoint.snapshot)
            stream = [stream.name for stream in self.manager.geometry.layout.streams].index("mtp.1.before")
            self.pools.conv[stream].rows[base : base + self.manager.geometry.layout.history] = 0
        return outputs


def test_a_drafters_state_is_compared_with_the_models(audit_small):
    hit = GUESSED.replace("cold", "hit")
    report = audit_small(GUESSED, hit, speculative_config=HEADS)
    assert (report.status, report.mismatches) == (0, 0)
    plain = audit_small(GUESSED, hit, speculative_config=SpeculativeConfig(method="ngram"))
    assert report.observations > 1.2 * plain.observations
    spoiled = audit_small(GUESSED, hit, speculative_config=HEADS, make_engine=LosesDraftRows)
    assert spoiled.status == 1
    assert (spoiled.first_difference.layer, spoiled.first_difference.component) == ("mtp.1", "before convolution input")


def test_the_reference_makes_no_guesses(audit_small):
    engines = []

    def made(config, *drafter):
        engines.append(Engine(config, *drafter))
        return engines[-1]

    report = audit_small(GUESSED, speculative_config=HEADS, make_engine=made)
    assert report.status == 0
    reference, guessing = (engine.scheduler.counters.num_draft_tokens for engine in engines)
    assert reference == 0 < guessing


def test_damage_that_a_hit_brings_along_is_found_in_the_state(audit_small):
    first = audit_small(HIT, make_engine=SpoilsSiblings).first_difference
    assert (first.layer, first.component, first.position, first.element) == ("full #0", "k", 0, 0)


def test_prompts_with_scored_tokens_are_hits_too(sound):
    hit = next(result for result in sound.scenarios if result.name == HIT)
    assert hit.cells[5].request == "builtin 5: 19 tokens"
    assert hit.cells[5].positions == 2 * (14 + 8)
    assert hit.cells[5].hits == 2


def test_pages_shorter_than_the_history_of_a_convolution_are_audited(audit_small):
    report = audit_small(COLD, HIT, page_size=2)
    assert (report.status, report.mismatches) == (0, 0)


def test_an_answer_that_depends_on_the_batch_is_found_in_the_batch_only(audit_small):
    report = audit_small(COLD, BATCH, make_engine=DependsOnTheBatch)
    alone, batch = report.scenarios
    assert (report.status, alone.counts.mismatches) == (1, 0)
    assert batch.counts.mismatches > 0
    assert report.first_difference.component == "logprob"
    assert report.first_difference.layer == ""


@pytest.mark.parametrize(
    ("scenario", "make_engine", "problem"),
    [
        (HIT, forced(enable_prefix_caching=False), "no request was a cache hit"),
        (COLD, forced(enable_prefix_caching=False), "no state was published"),
        (COLD, MixesNamespaces, "requests that had to be cold were cache hits"),
        (PREEMPTED, forced(schedule=Schedule()), "no request was preempted"),
        (BATCH, forced(max_num_seqs=1), "no step served two requests"),
        ("off/solo/7/eager", forced(schedule=Schedule()), "no prompt was cut into chunks"),
        (COLD, CountsARefusal, "num_refused_checkpoints rose by"),
        (GUESSED, forced(speculative_config=None), "0 tokens were guessed"),
        (TOLD, forced(schedule=Schedule(spoil_percent=100)), " guesses were accepted"),
        (COLD, forced(speculative_config=DEFAULT), "tokens were guessed"),
    ],
)
def test_a_scenario_that_did_not_happen_is_a_failure(audit_small, scenario, make_engine, problem):
    report = audit_small(scenario, make_engine=make_engine)
    assert (report.mismatches, report.status) == (0, 1)
    assert any(problem in found for found in report.problems), report.problems


def test_a_reference_with_too_small_a_cache_does_not_pass_for_a_proof(audit_small):
    def make(config):
        return Engine(msgspec.structs.replace(config, num_checkpoints=1) if is_reference(config) else config)

    report = audit_small(COLD, make_engine=make)
    assert report.status == 1
    assert any("have no reference" in problem for problem in report.problems)


def test_answers_that_are_all_the_same_error_prove_nothing(audit_small):
    class Fails(Engine):
        def step(self):
            return [msgspec.structs.replace(o, error="broken", finish_reason="error") for o in super().step()]

    report = audit_small("off/solo/whole/eager", make_engine=Fails)
    assert (report.mismatches, report.status) == (0, 1)
    assert "failed: 'broken'" in report.problems[0]


def test_engines_are_poisoned_and_the_reference_has_one_thread_and_no_disturbance(audit_small):
    configs = []

    def make(config):
        configs.append(config)
        return Engine(config)

    audit_small(COLD, PREEMPTED, "off/solo/7/trace", make_engine=make)
    assert all(config.poison for config in configs)
    reference, cold, preempted, off = configs
    assert (reference.num_threads, reference.schedule, is_reference(reference)) == (1, Schedule(), True)
    assert (cold.schedule.preempt_percent, cold.enable_prefix_caching, is_reference(cold)) == (0, True, False)
    assert preempted.schedule.preempt_percent > 0
    assert [config.graph for config in configs] == ["eager", "eager", "eager", "trace"]
    assert (off.enable_prefix_caching, off.schedule.chunk_sizes) == (False, (7,))


def test_when_time_is_up_no_scenario_begins_and_the_report_counts_those_that_are_left(audit_small):
    begun = []

    def late(_result, _total):
        begun.append(1)
        clock.undo()
        clock.setattr(time, "monotonic", lambda: 1e12)

    with pytest.MonkeyPatch.context() as clock:
        report = audit_small(COLD, PREEMPTED, "off/solo/7/trace", max_seconds=3600.0, on_scenario=late)
    assert (len(begun), len(report.scenarios), report.scenarios_left) == (1, 1, 2)
    assert report.status == 0


@pytest.mark.parametrize("speculative_config", [None, SpeculativeConfig(method="ngram")])
def test_an_audit_of_a_drafter_begins_with_its_guesses(audit_small, speculative_config):
    class EnoughError(Exception):
        pass

    seen = []

    def first(result, _total):
        seen.append(result.name)
        raise EnoughError

    with pytest.raises(EnoughError):
        audit_small(on_scenario=first, speculative_config=speculative_config)
    assert seen[0].endswith("/own") == (speculative_config is not None)
    assert sorted(all_scenarios(own_first=True), key=str) == sorted(all_scenarios(), key=str)


def test_scenarios_are_every_combination_once():
    found = all_scenarios()
    assert len({scenario.name for scenario in found}) == len(found) == 70
