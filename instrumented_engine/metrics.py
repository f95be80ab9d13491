"""What /metrics tells, with the names, types, labels and bucket bounds of vLLM 0.32. Pure: no HTTP, no clock.

The counters of a live engine move by what they are told; what scrapes of a finished run would have shown is worked out by step in
`vllm_scrapes.py`. Compared with recorded scrapes in ``tests/engine/test_server_metrics.py``. As in vLLM: prompt tokens count when
the prompt's first token comes, `iteration_tokens_total` holds computed prompt tokens (not the cached ones, and no recomputation)
and generated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items

from phasewise.instrumented_engine.config import EngineConfig
from phasewise.instrumented_engine.histogram import Histogram, one_two_five
from phasewise.instrumented_engine.recording import STEP_COLUMNS
from phasewise.instrumented_engine.sequence import Sequence

TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
GAP_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
PHASE_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
ITERATION_BOUNDS_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
SERVED = ("stop", "length")  # finish reasons of what ended as it should
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_LAST, _DECODES, _RUNNING, _WAITING, _USED, _PREEMPTIONS = (
    STEP_COLUMNS.index(name)
    for name in (
        "last_chunks", "decode_sequences", "running", "waiting_slot", "kv_blocks_used", "preemptions",
    )
)  # fmt: skip
Labels = Mapping[str, str]


class EngineCounters:
    """Fed by whoever watches the engine; `render` writes the text.

    Of a request: `observe_admission` when it first gets a seat, `observe_first_token`, `observe_gap` for each later token,
    `observe_request` when it has ended. Of a step: `observe_step`. Seconds and tokens.
    """

    def __init__(
        self,
        *,
        model: str,
        config: EngineConfig,
        kv_blocks: int,
        start_s: float,
        engine: str = "0",
        kv_dtype: str = "auto",
    ) -> None:
        """start_s: Unix time of the engine's start. kv_blocks: size of its pool."""
        self._base = {"engine": engine, "model_name": model}
        self._start_s = start_s
        self._kv_blocks = kv_blocks
        self._config = config
        self._kv_dtype = kv_dtype
        self.running = 0
        self.waiting = (0, 0, 0, 0, 0)  # by QUEUE_REASONS
        self.kv_blocks_used = 0
        self.preemptions = 0
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.refused = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
        sizes = one_two_five(config.max_model_tokens)
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.gaps = Histogram(GAP_BOUNDS_S)
        self.tpot = Histogram(GAP_BOUNDS_S)
        self.iteration_tokens = Histogram(ITERATION_BOUNDS_TOKENS)
        self.phases = {name: Histogram(PHASE_BOUNDS_S) for name in ("e2e", "queue", "inference", "prefill", "decode")}
        self.sizes = {name: Histogram(sizes) for name in ("prompt", "generation", "longest", "limit", "computed")}
        self.params_n = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.request_preemptions = Histogram((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0))

    # --- observations ------------------------------------------------------------------------------------------------

    def observe_step(self, row: tuple[int, ...], prompts_ended: Iterable[Sequence] = ()) -> None:
        """row: one of `Recording.steps` (STEP_COLUMNS). prompts_ended: whose prompt this step finished for the first time."""
        self.observe_state(row[_RUNNING], row[_WAITING : _WAITING + 5], row[_USED])
        self.preemptions += row[_PREEMPTIONS]
        generated = row[_DECODES] + row[_LAST]
        self.generation_tokens += generated
        computed = 0
        for sequence in prompts_ended:
            cached = sequence.cached_tokens or 0
            computed += sequence.spec.prompt_tokens - cached
            self.prompt_tokens += sequence.spec.prompt_tokens
            self.cached_tokens += cached
        self.iteration_tokens.observe(computed + generated)

    def observe_state(self, running: int, waiting: tuple[int, ...], kv_blocks_used: int) -> None:
        """The gauges as they stand between steps."""
        self.running = running
        self.waiting = (waiting[0], waiting[1], waiting[2], waiting[3], waiting[4])
        self.kv_blocks_used = kv_blocks_used

    def observe_admission(self, sequence: Sequence) -> None:
        """The prefix cache was asked for it."""
        if self._config.prefix_sharing and sequence.cached_tokens is not None:
            self.prefix_queries_tokens += sequence.spec.prompt_tokens
            self.prefix_hits_tokens += sequence.cached_tokens

    def observe_first_token(self, ttft_s: float) -> None:
        self.ttft.observe(ttft_s)

    def observe_gap(self, gap_s: float, times: int = 1) -> None:
        """Time between two outputs of one sequence."""
        self.gaps.observe(gap_s, times)

    def observe_refusal(self, reason: str) -> None:
        """reason: one of few words (`Refusal.kind`), since each makes a series."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def observe_request(
        self, sequence: Sequence, *, n: int = 1, arrival_ns: int | None = None, queued_ns: int | None = None
    ) -> None:
        """A sequence has ended. Latencies of what was served only: an aborted one is counted and told no more, as in vLLM.

        arrival_ns: when its call came in, queued_ns: when it counts as queued, where those are not the engine's own moments.
        n: sequences of its call.
        """
        reason = sequence.finish_reason or "error"
        self.finished[reason if reason in self.finished else "error"] += 1
        scheduled, first, last, ended = (
            sequence.scheduled_ns, sequence.first_token_ns, sequence.last_token_ns, sequence.finished_ns,
        )  # fmt: skip
        queued = sequence.queued_ns if queued_ns is None else queued_ns
        if (
            reason not in SERVED
            or scheduled is None
            or first is None
            or last is None
            or ended is None
            or queued is None
        ):
            return
        spec, tokens = sequence.spec, sequence.output_tokens
        arrival = spec.arrival_ns if arrival_ns is None else arrival_ns
        self.phases["e2e"].observe((ended - arrival) / 1e9)
        self.phases["queue"].observe((scheduled - queued) / 1e9)
        self.phases["inference"].observe((last - scheduled) / 1e9)
        self.phases["prefill"].observe((first - scheduled) / 1e9)
        self.phases["decode"].observe((last - first) / 1e9)
        if tokens > 1:
            self.tpot.observe((last - first) / 1e9 / (tokens - 1))
        self.sizes["prompt"].observe(spec.prompt_tokens)
        self.sizes["generation"].observe(tokens)
        self.sizes["longest"].observe(tokens)
        self.sizes["limit"].observe(spec.max_output_tokens)
        self.sizes["computed"].observe(spec.prompt_tokens - (sequence.cached_tokens or 0))
        self.params_n.observe(n)
        self.request_preemptions.observe(sequence.preemptions)

    # --- the text ----------------------------------------------------------------------------------------------------

    def render(self, now_s: float) -> str:
        """The exposition at a moment. now_s: Unix time; before the engine's start there is nothing to tell."""
        if now_s < self._start_s:
            return ""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        yield from _scalar("process_start_time_seconds", "gauge", _START, [({}, self._start_s)])
        for name in ("flops", "read_bytes", "write_bytes"):
            yield from self._counter(f"estimated_{name}_per_gpu", _ESTIMATED[name], 0)  # not enabled: never moves
        waiting = sum(self.waiting)
        held = self.waiting[3]  # the batching window holds them back on purpose
        yield from self._gauge("num_requests_running", _RUNNING_HELP, [({}, self.running)])
        yield from self._gauge("num_requests_waiting", _WAITING_HELP, [({}, waiting)])
        reasons = [({"reason": "capacity"}, waiting - held), ({"reason": "deferred"}, held)]
        yield from self._gauge("num_requests_waiting_by_reason", _BY_REASON_HELP, reasons)
        sleeping = [
            ({"sleep_state": state}, state == "awake") for state in ("awake", "weights_offloaded", "discard_all")
        ]
        yield from self._gauge("engine_sleep_state", "Engine sleep state; awake = 1: it serves.", sleeping)
        yield from self._gauge("kv_cache_usage_perc", _KV_HELP, [({}, self.kv_blocks_used / max(1, self._kv_blocks))])
        yield from self._counter(
            "prefix_cache_queries", "Tokens the prefix cache was asked for.", self.prefix_queries_tokens
        )
        yield from self._counter("prefix_cache_hits", "Tokens the prefix cache held.", self.prefix_hits_tokens)
        for name in (
            "external_prefix_cache_queries",
            "external_prefix_cache_hits",
            "mm_cache_queries",
            "mm_cache_hits",
        ):
            yield from self._counter(name, "This engine has no such cache.", 0)
        yield from self._counter("num_preemptions", "Preemptions since the start.", self.preemptions)
        yield from self._counter("prompt_tokens", "Prompt tokens, cached ones included.", self.prompt_tokens)
        computed, cached = self.prompt_tokens - self.cached_tokens, self.cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": 0}
        yield from self._counters("prompt_tokens_by_source", "Prompt tokens by source.", "source", sources)
        yield from self._counter("prompt_tokens_cached", "Cached prompt tokens.", cached)
        tiers = {"device": cached, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
        yield from self._counters("prompt_tokens_cached_by_source", "Cached prompt tokens by tier.", "source", tiers)
        yield from self._counter("generation_tokens", "Generated tokens.", self.generation_tokens)
        yield from self._counters("request_success", "Ended requests by reason.", "finished_reason", self.finished)
        model = {"model_name": self._base["model_name"]}
        rows = [({"reason": reason}, float(count)) for reason, count in self.refused.items()]
        yield from _counter("vllm:admission_rejections", "Arrivals refused, by reason.", rows, model, self._start_s)
        for name, (told, histogram) in self._histograms().items():
            yield from _histogram(f"vllm:{name}", told, histogram, self._base, self._start_s)
        cache = [(self._cache_labels(), 1.0)]  # vLLM names no model here
        yield from _scalar("vllm:cache_config_info", "gauge", "How the KV cache is set.", cache)

    def _histograms(self) -> dict[str, tuple[str, Histogram]]:
        return {
            "request_prompt_tokens": ("Prompt tokens of a request.", self.sizes["prompt"]),
            "request_generation_tokens": ("Generated tokens of a request.", self.sizes["generation"]),
            "iteration_tokens_total": ("Tokens of an engine step.", self.iteration_tokens),
            "request_max_num_generation_tokens": (
                "Generated tokens of a call's longest sequence.",
                self.sizes["longest"],
            ),
            "request_params_n": ("Sequences asked for by a call.", self.params_n),
            "request_params_max_tokens": ("Output limit asked for.", self.sizes["limit"]),
            "time_to_first_token_seconds": ("Arrival to first token handed over.", self.ttft),
            "inter_token_latency_seconds": ("Time between two outputs.", self.gaps),
            "request_time_per_output_token_seconds": ("Mean time per output token of a request.", self.tpot),
            "e2e_request_latency_seconds": ("Arrival to end.", self.phases["e2e"]),
            "request_queue_time_seconds": ("Queued to first scheduled.", self.phases["queue"]),
            "request_inference_time_seconds": ("First scheduled to last token.", self.phases["inference"]),
            "request_prefill_time_seconds": ("First scheduled to first token.", self.phases["prefill"]),
            "request_decode_time_seconds": ("First to last token.", self.phases["decode"]),
            "request_num_preemptions": ("Preemptions of a request.", self.request_preemptions),
            "request_prefill_kv_computed_tokens": (
                "Prompt tokens computed, cached ones left out.",
                self.sizes["computed"],
            ),
        }

    def _cache_labels(self) -> dict[str, str]:
        config = self._config
        return {
            "block_size": str(config.block_tokens),
            "cache_dtype": self._kv_dtype,
            "engine": self._base["engine"],
            "enable_prefix_caching": str(config.prefix_sharing and config.kv_layout == "paged"),
            "kv_cache_size_tokens": str(self._kv_blocks * config.block_tokens),
            "num_gpu_blocks": str(self._kv_blocks),
            "num_gpu_blocks_override": str(config.kv_blocks),
        }

    def _gauge(self, name: str, told: str, rows: Items[tuple[dict[str, str], float]]) -> Iterator[str]:
        yield from _scalar(f"vllm:{name}", "gauge", told, [({**labels, **self._base}, value) for labels, value in rows])

    def _counter(self, name: str, told: str, value: float) -> Iterator[str]:
        yield from _counter(f"vllm:{name}", told, [({}, value)], self._base, self._start_s)

    def _counters(self, name: str, told: str, label: str, values: Mapping[str, float]) -> Iterator[str]:
        rows = [({label: key}, value) for key, value in values.items()]
        yield from _counter(f"vllm:{name}", told, rows, self._base, self._start_s)


_START = "Start time of the process since unix epoch in seconds."
_ESTIMATED = {
    "flops": "Modelled floating point operations; not enabled here.",
    "read_bytes": "Modelled bytes read; not enabled here.",
    "write_bytes": "Modelled bytes written; not enabled here.",
}
_RUNNING_HELP = "Sequences that hold a seat."
_WAITING_HELP = "Sequences in the queue."
_BY_REASON_HELP = (
    "Sequences in the queue: capacity (seats, blocks, step tokens, order) or deferred (the batching window)."
)
_KV_HELP = "Share of the KV blocks in use, 0 to 1."


def counter_lines(name: str, told: str, value: float) -> list[str]:
    """One counter without labels, for what is told beside the engine's own."""
    return list(_scalar(f"{name}_total", "counter", told, [({}, value)]))


def _scalar(name: str, kind: str, told: str, rows: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"
    for labels, value in rows:
        yield f"{name}{braces(labels)} {float(value)!r}"


def _counter(
    name: str, told: str, rows: Iterable[tuple[Labels, float]], base: Labels, created_s: float
) -> Iterator[str]:
    whole = [({**labels, **base}, value) for labels, value in rows]
    yield from _scalar(f"{name}_total", "counter", told, whole)
    yield from _scalar(f"{name}_created", "gauge", told, [(labels, created_s) for labels, _ in whole])


def _histogram(name: str, told: str, histogram: Histogram, base: Labels, created_s: float) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} histogram"
    cumulative = histogram.cumulative()
    for bound, count in zip((*histogram.bounds, None), cumulative, strict=True):
        edge = "+Inf" if bound is None else repr(float(bound))
        yield f"{name}_bucket{braces({**base, 'le': edge})} {float(count)!r}"
    yield f"{name}_count{braces(base)} {float(cumulative[-1])!r}"
    yield f"{name}_sum{braces(base)} {histogram.total!r}"
    yield from _scalar(f"{name}_created", "gauge", told, [(base, created_s)])


def braces(labels: Labels) -> str:
    """Labels as they stand behind a name: in order, escaped; nothing where there are none."""
    if not labels:
        return ""
    inner = ",".join(f'{key}="{_escaped(labels[key])}"' for key in sorted(labels))
    return "{" + inner + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
