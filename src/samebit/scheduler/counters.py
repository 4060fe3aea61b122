"""What a scheduler has counted since its start."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from samebit.core.request import MissReason, SpeculationCounts


@dataclass(slots=True)
class Counters:
    """Totals. `accepted_per_position[i]`: how often a row's i-th guess was accepted, of as many as a row can have."""

    num_preemptions: int = 0
    num_published: int = 0
    num_refused_checkpoints: int = 0
    num_damaged_resumes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    misses: dict[MissReason, int] = field(default_factory=dict)

    def verified(self, num_guesses: int, num_accepted: int) -> SpeculationCounts:
        """Count a row of guesses, and return it as a request's own count."""
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
        self.num_drafts += 1
        self.num_draft_tokens += num_guesses
        self.num_accepted_tokens += num_accepted
        return SpeculationCounts(1, num_guesses, (1,) * num_accepted)

    def missed(self, reason: MissReason) -> None:
        """Count a request that found nothing in the prefix cache."""
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def totals(self) -> dict[str, float]:
        """All by name; `num_accepted_tokens_at_i` is that of position i, `misses_r` of reason r, `mean_acceptance_length` 0 before the first guess."""
        values = asdict(self)
        positions = values.pop("accepted_per_position")
        mean = 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0
        at = {f"num_accepted_tokens_at_{position}": count for position, count in enumerate(positions)}
        misses = {f"misses_{reason}": count for reason, count in values.pop("misses").items()}
        return {**values, **at, **misses, "mean_acceptance_length": mean}
