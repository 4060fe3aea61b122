"""Kernel sets: one interface, several implementations, chosen once (selection.py) and handed to the layers.

Every function is *row-pure*: output row i has the same bits whatever the number of rows, the row's place, its
neighbours, padding, the cut of a sequence into steps, and the number of threads. Two sets agree within rounding, not bit for
bit; the set is part of the numerics profile. Knows nothing of requests or models.

Activations, K, V and conv rows are of the set's ``element``: fp32 on a CPU. Where that is bf16, sums, norms, softmax, routing and
the residual stream are fp32 still, and whatever is kept in a pool is rounded before the step uses it, so that both are the same.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from torch import Tensor

from samebit.kernels import torch_set
from samebit.kernels.ops import operators
from samebit.kernels.values import (
    AttnIndex,
    BlockIndex,
    ConvIndex,
    DraftIndex,
    DraftWords,
    Element,
    EntryIndex,
    IndexSizes,
    KvIndex,
    Packed,
    PackedExperts,
    PageTags,
    SampleColumns,
    Turn,
    UnsupportedSizeError,
)


@dataclass(frozen=True, slots=True, eq=False)
class KernelSet:
    """The kernels of a host. Sizes: T tokens, C channels, nh/nk query/KV heads of hd, V vocabulary, L logit rows."""

    name: str
    num_threads: int
    details: Mapping[str, str] = field(repr=False)
    _pack: Callable[[Tensor], Tensor] = field(repr=False)
    _ops: SimpleNamespace = field(repr=False)
    torch_shapes: frozenset[tuple[int, int]] = frozenset()
    _count_launches: Callable[[], int] = field(default=lambda: 0, repr=False)
    element: Element = "float32"
    _library_rows: Callable[[Tensor], frozenset[int]] = field(default=lambda _: frozenset(), repr=False)
    limits: Mapping[str, int] = field(default_factory=dict, repr=False)
    _compile_for: Callable[[Callable[[], object]], None] = field(default=lambda _: None, repr=False)

    def check_size(self, what: str, size: int) -> None:
        """Raise UnsupportedSizeError if ``size`` is more than the set's limit of ``what``, if it has one."""
        if size > self.limits.get(what, size):
            raise UnsupportedSizeError(f"{size} {what}: the {self.name} kernels have at most {self.limits[what]}")

    def describe(self) -> dict[str, str | int]:
        """What the numerics profile records of this set: the name and what the bits depend on."""
        shapes = " ".join(f"{rows}x{columns}" for rows, columns in sorted(self.torch_shapes))
        return {"kernels": self.name, **self.details, **({"torch_shapes": shapes} if shapes else {})}

    def num_launches(self) -> int:
        """Kernels that this thread has launched so far, counted below the dispatcher; 0 where there is nothing below it."""
        return self._count_launches()

    def compile_for(self, run: Callable[[], object]) -> None:
        """Have the kernels that ``run`` calls compiled, side by side, where that is done at first use; none runs, and nothing is changed."""
        self._compile_for(run)

    def without(self, shapes: Iterable[tuple[int, int]]) -> "KernelSet":
        """This set, except that products with weights of these shapes (N, K) are left to the torch set."""
        return replace(self, torch_shapes=self.torch_shapes | frozenset(shapes))

    def _maker(self, *weights: Tensor) -> tuple[Callable[[Tensor], Tensor], SimpleNamespace]:
        """Who packs these weights and multiplies by them."""
        if any((w.shape[-2], w.shape[-1]) in self.torch_shapes for w in weights):
            return torch_set.pack_linear, operators("torch", torch_set.IMPLEMENTATIONS)
        return self._pack, self._ops

    def pack_linear(self, weight: Tensor, *, wide: bool = False) -> Packed:
        """Lay out a weight [N, K] fp32 or bf16 for ``linear``; bf16 stays two bytes an element where the set can."""
        pack, ops = self._maker(weight)
        packed = pack(weight)
        made = (ops.linear, ops.addends, ops.normed_linear)
        return Packed(packed, weight.shape[0], wide, *made, self._library_rows(packed))

    def step_index(self, fields: list[Tensor], tables: list[Tensor], results: list[Tensor], sizes: IndexSizes) -> None:
        """Positions, ring rows, page slots and tags of a step, from its inputs and the slot tables.

        ``fields``, ``tables`` and ``results`` (made by ``index_results``) are in the order of IndexFields, INDEX_TABLES
        and INDEX_RESULTS, where groups follow. Page deltas are applied first; last, ``tables`` get what the step's
        kernels are going to write. What a row reads from is decided before that.
        """
        self._ops.step_index(fields, tables, results, sizes)

    def accept(self, drawn: Tensor, ix: DraftIndex, length: Tensor, next_token: Tensor, max_drafts: int) -> Tensor:
        """How many of each batch row's drafts, from the first on, equal what was drawn for their places: [B] int32.

        ``drawn`` [L] int32 are the logits rows' tokens. Each row's slot gets its new ``length``, which counts the accepted
        drafts, and, if anything was drawn for it, its ``next_token``: what was drawn after the last accepted draft.
        """
        accepted: Tensor = self._ops.accept(
            drawn, ix.token_ids, ix.query_start, ix.row_slots, ix.row_start, ix.row_drafts, ix.row_first_draw,
            length, next_token, max_drafts,
        )  # fmt: skip
        return accepted

    def draft_words(
        self, slots: Tensor, samples: Tensor, length: Tensor, next_token: Tensor, sampling: SampleColumns,
        words: DraftWords, filler: int,
    ) -> None:  # fmt: skip
        """Put into ``words`` all that rows guess by, from what their slots hold: zeros for the inert slot.

        ``slots`` [P] int32; ``samples`` [P] int32: the rows of ``sampling`` whose settings guesses are drawn with. A block is the
        last token and then ``filler``, at the positions from that token's on; the first guess's is the one behind it.
        """
        self._ops.draft_words(
            slots, samples, length, next_token, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
            sampling.seed, sampling.sample_index, list(words), filler,
        )  # fmt: skip

    def keep_drafts(self, tokens: Tensor, slots: Tensor, drafts: Tensor) -> Tensor:
        """Put guesses ``tokens`` [P, D] int32 into the first columns of rows ``slots`` [P] int32 of ``drafts`` [S, D or more]; a dense copy."""
        kept: Tensor = self._ops.keep_drafts(tokens, slots, drafts)
        return kept

    def acknowledge(self, ix: EntryIndex, row_tags: Tensor, pages: PageTags) -> tuple[Tensor, Tensor]:
        """Which entries' pages carry their stamps in every layer, and which entries' rows their tag in every stream: [E] bool each.

        ``row_tags`` [streams, num_rows] int64. Rows in the sink are not written; an entry at 0 has no pages.
        """
        pages_intact, rows_written = self._ops.acknowledge(
            ix.rows, ix.boundaries, ix.tags, ix.dest, ix.row_slots, row_tags, pages.found, pages.table, pages.stamps,
            pages.windows, pages.page_size,
        )  # fmt: skip
        return pages_intact, rows_written

    def linear(self, x: Tensor, w: Packed) -> Tensor:
        """``x`` [T, K] times the transposed weight: [T, N], in fp32 if the weight was packed as ``wide``."""
        return w.product(x, w.data, w.num_out, w.wide, x.shape[0] in w.library_rows, self.num_threads)

    def addends(self, x: Tensor, w: Packed) -> Tensor:
        """[S, T, N] fp32, whose sum over S, in ascending order, is ``linear`` of a ``wide`` weight: S is 1 where nothing is gained by others."""
        return w.addends(x, w.data, w.num_out, x.shape[0] in w.library_rows, self.num_threads)

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * gain`` over each C columns of [T, n C], with a gain [C] (Zhang and Sennrich, 2019)."""
        out: Tensor = self._ops.rms_norm(x, gain, eps, self.num_threads)
        return out

    def add_norm(self, x: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``x + y`` in fp32, and its ``rms_norm``."""
        total, normed = self._ops.add_norm(x, y, gain, eps, self.num_threads)
        return total, normed

    def swiglu(self, z: Tensor) -> Tensor:
        """``silu(gate) * up`` for ``z`` [T, 2I] = gate | up (Shazeer, 2020)."""
        out: Tensor = self._ops.swiglu(z, self.num_threads)
        return out

    def normed_linear(
        self, x: Tensor, y: Tensor, gain: Tensor, eps: float, w: Packed, *, is_gated: bool
    ) -> tuple[Tensor, Tensor]:
        """``add_norm``, ``linear`` of the norm and, if ``is_gated``, ``swiglu`` of that: the sum, and [T, N] or [T, N / 2]."""
        assert not w.wide, "a product of norms is of activations"
        library = x.shape[0] in w.library_rows
        return w.normed(x, y, gain, eps, w.data, w.num_out, library, is_gated, self.num_threads)

    def short_conv(
        self, x: Tensor, taps: Tensor, rows: Tensor, row_tags: Tensor, ix: ConvIndex, residual: Tensor | None
    ) -> Tensor:
        """Depthwise causal convolution with inner residual; keeps inputs in ``rows`` [num_rows, C] and their tags.

        y[t] = sum_j taps[j] * x[t - K + 1 + j] (in order of j) + x[t] + residual[t] for ``taps`` [K, C]; inputs before a
        batch row's first token are ``rows[read_rows]``. All reads of the pool happen before any write. Then checkpoint
        entries, the stored read rows and the tokens' inputs are written. A tag copied from a pool row carries the
        difference between the tag found and the tag expected, so a stale source spoils it. Writes to the sink are
        dropped. Padding tokens give zeros and write nothing.
        """
        out: Tensor = self._ops.short_conv(
            x, taps, rows, row_tags, ix.query_start, ix.read_rows, ix.read_tags, ix.store_rows, ix.store_tags,
            ix.write_rows, ix.write_tags, ix.entry_sources, ix.entry_source_tags, ix.entry_dest, ix.entry_tag,
            residual, self.num_threads,
        )  # fmt: skip
        return out

    def short_conv_norm(
        self,
        x: Tensor,
        taps: Tensor,
        rows: Tensor,
        row_tags: Tensor,
        ix: ConvIndex,
        residual: Tensor,
        gain: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """``short_conv`` and ``rms_norm`` of what it gives, with a gain [C]: both [T, C]."""
        y, normed = self._ops.short_conv_norm(
            x, taps, rows, row_tags, ix.query_start, ix.read_rows, ix.read_tags, ix.store_rows, ix.store_tags,
            ix.write_rows, ix.write_tags, ix.entry_sources, ix.entry_source_tags, ix.entry_dest, ix.entry_tag,
            residual, gain, eps, self.num_threads,
        )  # fmt: skip
        return y, normed

    def shift(self, x: Tensor, rows: Tensor, row_tags: Tensor, ix: ConvIndex) -> Tensor:
        """y[t] = x[t - 1] for ``x`` [T, C], exactly; inputs are kept, and read before the step, as ``short_conv`` does."""
        out: Tensor = self._ops.shift(
            x, rows, row_tags, ix.query_start, ix.read_rows, ix.read_tags, ix.store_rows, ix.store_tags, ix.write_rows,
            ix.write_tags, ix.entry_sources, ix.entry_source_tags, ix.entry_dest, ix.entry_tag, self.num_threads,
        )  # fmt: skip
        return out

    def write_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gains: tuple[Tensor, Tensor],
        eps: float,
        k_pages: Tensor,
        v_pages: Tensor,
        page_tags: Tensor,
        ix: KvIndex,
        turn: Turn | None = None,
    ) -> Tensor:
        """Normed queries; normed keys and the values go into pages, completed ones of which are stamped in ``page_tags``.

        ``rms_norm`` of each head, with a gain [hd] for q and for k; then heads are turned if there is a ``turn``. ``q`` [T, nh * hd],
        where nh may be 0, ``k`` and ``v`` [T, nk * hd]; gives [T, nh * hd]. Pages [P, nk, page_size, hd] must be of the set's element.
        """
        turning = (None, None, None) if turn is None else (turn.positions, turn.cos, turn.sin)
        out: Tensor = self._ops.write_heads(
            q, k, v, *gains, eps, k_pages, v_pages, page_tags, ix.write_slots, ix.stamp_pages, ix.stamp_tags, *turning,
            self.num_threads,
        )  # fmt: skip
        return out

    def conv_heads(
        self,
        q: Tensor,
        kv: Tensor,
        taps: Tensor,
        rows: Tensor,
        row_tags: Tensor,
        conv_ix: ConvIndex,
        gains: tuple[Tensor, Tensor],
        eps: float,
        k_pages: Tensor,
        v_pages: Tensor,
        page_tags: Tensor,
        kv_ix: KvIndex,
    ) -> Tensor:
        """``short_conv`` of keys and values ``kv`` [T, 2 nk * hd] side by side, and ``write_heads`` of what it gives."""
        ix = conv_ix
        out: Tensor = self._ops.conv_heads(
            q, kv, taps, rows, row_tags, ix.query_start, ix.read_rows, ix.read_tags, ix.store_rows, ix.store_tags,
            ix.write_rows, ix.write_tags, ix.entry_sources, ix.entry_source_tags, ix.entry_dest, ix.entry_tag, *gains,
            eps, k_pages, v_pages, page_tags, kv_ix.write_slots, kv_ix.stamp_pages, kv_ix.stamp_tags, self.num_threads,
        )  # fmt: skip
        return out

    def turn_heads(self, x: Tensor, gains: Tensor, eps: float, turn: Turn) -> Tensor:
        """``rms_norm`` of each head of ``x`` [T, n * hd], with its own of the gains [n, hd], and then turned: [T, n * hd]."""
        out: Tensor = self._ops.turn_heads(x, gains, eps, turn.positions, turn.cos, turn.sin, self.num_threads)
        return out

    def attention(
        self,
        q: Tensor,
        rel: Tensor,
        rel_proj: Tensor,
        tau: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        ix: AttnIndex,
        window: int,
        scale: float,
    ) -> Tensor:
        """Causal attention of ``q`` [T, nh * hd] over paged keys, [T, nh * hd]; the step's own K/V is already paged.

        score[h, i, j] = (q_i . k_j * scale + bias(h, i, i - j)) * tau_i; bias = rel[i, h] . rel_proj[:, i - j] where
        i - j < extent, else 0; keys j <= i and, with ``window`` > 0, i - j < window. ``rel`` [T, nh * d_rel],
        ``rel_proj`` [d_rel, extent], ``tau`` [T]. Pages below the window are not read. Padding tokens give zeros.
        """
        out: Tensor = self._ops.attention(
            q, rel, rel_proj, tau, k_pages, v_pages, ix.query_start, ix.row_start, ix.row_slots, ix.page_table,
            ix.longest, window, scale, self.num_threads,
        )  # fmt: skip
        return out

    def block_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        ix: BlockIndex,
        window: int,
        scale: float,
        *,
        is_causal: bool,
    ) -> Tensor:
        """Attention of P blocks of N rows: ``q`` [P * N, nh * hd] over pages and over ``k``, ``v`` [P * N, nk * hd], [P * N, nh * hd].

        A row at place o of a block behind n = ``lengths`` tokens sees their keys, in pages, and those of its own block, which
        are in none; if ``is_causal``, only of places up to o. With ``window`` > 0 both only where positions differ by less.
        Pages outside of what is seen are not read. Scores are q . k * scale.
        """
        out: Tensor = self._ops.block_attention(
            q, k, v, k_pages, v_pages, ix.lengths, ix.row_slots, ix.page_table, window, is_causal, scale,
            self.num_threads,
        )  # fmt: skip
        return out

    def route(self, logits: Tensor, bias: Tensor, top_k: int, num_shared: int, scale: float) -> tuple[Tensor, Tensor]:
        """Experts of each token and their weights, [T, top_k + num_shared] int32 and fp32, from logits [T, E + shared].

        The ``top_k`` of sigmoid(logits) + bias in descending order, ties to the lower id, then the shared experts
        E, E + 1, ...; weights are the sigmoids of the chosen raw logits divided by their sum, times ``scale``.
        """
        ids, weights = self._ops.route(logits, bias, top_k, num_shared, scale, self.num_threads)
        return ids, weights

    def pack_experts(self, w13: Tensor, w2: Tensor) -> PackedExperts:
        """Lay out ``w13`` [E, 2I, H] (gate rows, then up rows) and ``w2`` [E, H, I] for ``mixture``."""
        pack, ops = self._maker(w13, w2)
        return PackedExperts(pack(w13), pack(w2), w13.shape[1] // 2, ops.mixture)

    def mixture(
        self,
        x: Tensor,
        logits: Tensor,
        bias: Tensor,
        top_k: int,
        num_shared: int,
        scale: float,
        num_tokens: Tensor,
        w: PackedExperts,
    ) -> Tensor:
        """Sum over a token's slots, in order, of weight * expert(x), [T, H], for what ``route`` gives; zeros from ``num_tokens`` [1] int32 on.

        ``logits`` [S, T, E + shared] are ``addends``.
        """
        return w.product(
            x, logits, bias, top_k, num_shared, scale, num_tokens, w.w13, w.w2, w.intermediate, self.num_threads
        )

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows ``ids`` [T] int32 of ``table`` [V, C] fp32 or bf16, as fp32 [T, C]."""
        out: Tensor = self._ops.embedding(ids, table, self.num_threads)
        return out

    def take_rows(self, x: Tensor, rows: Tensor, divisor: float) -> Tensor:
        """Rows ``rows`` [L] int64 of ``x`` [T, C], divided by ``divisor`` in fp32: [L, C] of the dtype of ``x``."""
        out: Tensor = self._ops.take_rows(x, rows, divisor)
        return out

    def joined_sums(self, x: list[Tensor], y: list[Tensor]) -> Tensor:
        """``x[i] + y[i]``, of [T, C] fp32 and [T, C], for all i side by side: activations [T, n C]."""
        out: Tensor = self._ops.joined_sums(x, y)
        return out

    def joined_bytes(self, parts: list[Tensor]) -> Tensor:
        """Dense uint8 tensors [n], one behind the other."""
        out: Tensor = self._ops.joined_bytes(parts)
        return out

    def sample(self, logits: Tensor, cols: SampleColumns) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw one token per row of ``logits`` [L, V]: ids int32, logprobs fp32, ranks int32, finite bool, each [L].

        Contract. scaled = logit / temperature in fp32. Filters in this order, on tokens sorted by descending scaled logit, ties to
        the lower id: top-k keeps the first k; top-p keeps the smallest prefix of what top-k left whose share of that mass is >=
        top_p; min-p keeps tokens whose probability is >= min_p times the largest. The most likely token always stays. The token is
        the argmax over the kept of scaled + noise, ties to the lower id, with the noise of ``samebit.kernels.noise.gumbel_noise``.
        Temperature 0: argmax of the logits, ties to the lower id. A ``target`` >= 0 is taken as the token. Logprobs are the fp32
        log-softmax of the raw logits at the token. The rank is 1 + the number of tokens with a larger logit, or an equal one and a
        lower id. A row with a NaN or an infinity returns token 0, an unspecified logprob and rank, and finite = False; ban a token
        with a large negative logit such as -1e30, not with -inf.
        """
        tokens, logprobs, ranks, finite = self._ops.sample(logits, *cols.tensors, self.num_threads)
        return tokens, logprobs, ranks, finite

    def draw(self, logits: Tensor, cols: SampleColumns) -> Tensor:
        """The ids that ``sample`` draws, [L] int32, alone."""
        tokens: Tensor = self._ops.draw(logits, *cols.tensors, self.num_threads)
        return tokens

    def top_logprobs(self, logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The ``n`` likeliest tokens of each row of [L, V] with their log-softmax, descending, ties to the lower id."""
        if n == 0:
            nothing = logits.new_empty(logits.shape[0], 0)
            return nothing.int(), nothing
        ids, logprobs = self._ops.top_logprobs(logits, n, self.num_threads)
        return ids, logprobs
