"""Writes the Grafana dashboards from the tables below. Each entry is a panel.

    python compose/grafana/make_dashboards.py [FOLDER]

Latency panels have exemplars: a dot is one request, and a click on it opens its trace in Jaeger.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from panels import Panel, dashboard, quantiles, rate, stat

FOLDER: Final = Path(__file__).resolve().parent / "dashboards"
TTFT: Final = "gen_ai_server_time_to_first_token_seconds"
TPOT: Final = "gen_ai_server_time_per_output_token_seconds"
PAIRS: Final = "rate(baton_rank_expert_pairs_total[1m])"
DURATION: Final = "gen_ai_server_request_duration_seconds"

OVERVIEW: Final = [
    stat("Requests", "sum(baton:requests:rate1m)", "reqps"),
    stat("Output tokens a second", "baton:output_tokens:rate1m"),
    stat("All tokens a second", "baton:total_tokens:rate1m"),
    stat("First token, p99", quantiles(TTFT, of=(99,))[0][0], "s"),
    stat("In flight", "sum(baton_requests_inflight)"),
    # A worker counts once, even if it is attached to several routers.
    stat(
        "Workers",
        "count by (role) (max by (role, worker) (baton_worker_up) == 1)",
        legend="{{role}}",
    ),
    Panel(
        "Requests by outcome",
        [("baton:requests:rate1m", "{{outcome}}")],
        "reqps",
        "OK, or the reason in the caller's error.",
        stacked=True,
    ),
    Panel(
        "Time to first token",
        quantiles(TTFT),
        "s",
        "From a request's arrival to its first token. Dots are requests: click for the trace.",
        exemplars=True,
    ),
    Panel(
        "Time per output token",
        quantiles(TPOT),
        "s",
        "Mean of each request, after its first token.",
        exemplars=True,
    ),
    Panel(
        "Tokens a second",
        [
            ("baton:output_tokens:rate1m", "output"),
            ("sum(rate(baton_prompt_tokens_total[1m]))", "prompt"),
        ],
    ),
    Panel("Router's queue", [("sum(baton_queue_depth)", "requests")]),
    Panel(
        "Time to empty the queue",
        [("max by (model) (baton_queue_drain_seconds)", "{{model}}")],
        "s",
        "At the measured rate. Refused callers are asked to wait this long.",
    ),
    Panel(
        "Refused before any work",
        [rate("baton_rejections", "reason")],
        "reqps",
        stacked=True,
    ),
    Panel(
        "Retries and failovers",
        [
            (rate("baton_retries", "cause")[0], "retry: {{cause}}"),
            (rate("baton_failovers", "cause")[0], "failover: {{cause}}"),
        ],
        "ops",
        "A retry is invisible to the client; a failover goes on with a stream that had begun.",
    ),
    Panel(
        "Workers lost",
        [("sum by (role, cause) (increase(baton_workers_lost_total[1m]))", "{{role}}: {{cause}}")],
        help="Number in a minute, without workers that announced their leave.",
        stacked=True,
    ),
    Panel(
        "Event loops",
        quantiles("baton_event_loop_lag_seconds", "job", of=(99,)),
        "s",
        "Delay of their wake-ups. Above about 10 ms a process is short of CPU.",
    ),
]

BALANCE: Final = [
    Panel(
        "Prefill work that waits",
        [("baton:prefill_backlog:seconds", "backlog")],
        "s",
        "Queued prompt tokens over the pool's rate. Steadily high: too few prefill workers.",
        limit=2,
    ),
    Panel(
        "Use of each pool over its target",
        [("max by (model, role) (baton_balance_ratio)", "{{model}} {{role}}")],
        help="With `--balance`: above 1.3, while the other pool is below 0.8, a worker moves.",
    ),
    Panel(
        "Changes of role",
        [
            (
                "sum by (to, cause) (increase(baton_role_changes_total[5m]))",
                "to {{to}}, by {{cause}}",
            )
        ],
        help="Number in five minutes.",
    ),
    Panel(
        "KV pages in use",
        [("baton:kv_in_use:ratio", "{{worker}}")],
        "percentunit",
        "Used, granted or quarantined. Decode workers near 1: too few of them.",
        limit=0.9,
    ),
    Panel(
        "Slots in use",
        [("baton:slots_in_use:ratio", "{{worker}}")],
        "percentunit",
        "Sequences, running or granted. Decode workers near 1: too few of them, or of slots.",
        limit=0.95,
    ),
    Panel(
        "Prompts that decode workers compute",
        [rate("baton_local_prefills", "reason")],
        "ops",
        "Prompts that decode workers compute themselves, by reason.",
        stacked=True,
    ),
    Panel("Wait in the router's queue", quantiles("baton_queue_wait_seconds"), "s"),
    Panel(
        "Requests that wait at workers",
        [("sum by (worker) (baton_waiting_requests)", "{{worker}}")],
        help="They wait for pages or for a slot.",
    ),
    Panel(
        "Prompt tokens a second",
        [rate("baton_prefill_tokens", "worker", "source")],
        help="Computed, or found in the prefix cache.",
        stacked=True,
    ),
    Panel(
        "Prefix cache hits",
        [("baton:prefix_hits:ratio5m", "hit rate")],
        "percentunit",
    ),
    Panel(
        "Prompt tokens found, by source",
        [rate("baton_prefill_found_tokens", "source")],
        help="In the pool, in a tier below it, or at a peer.",
        stacked=True,
    ),
    Panel(
        "Fetched from peers",
        [
            (
                'sum by (worker) (rate(baton_kv_fetch_bytes_total{direction="got"}[1m]))',
                "{{worker}}",
            )
        ],
        "Bps",
        stacked=True,
    ),
    Panel(
        "Pages computed again",
        [rate("baton_pages_computed_again", "reason")],
        help="Another worker holds them. docs/placing.md explains the reasons.",
        stacked=True,
    ),
    Panel(
        "First token, as a multiple of its forecast",
        quantiles("baton_first_token_forecast_ratio"),
    ),
    Panel(
        "Events of pages behind",
        [("max by (worker) (baton_page_events_behind)", "{{worker}}")],
        help="Announced by a worker and not received by a router: it may send prompts elsewhere.",
    ),
    Panel(
        "Pages that routers know",
        [("max by (worker, tier) (baton_known_pages)", "{{worker}}: {{tier}}")],
        stacked=True,
    ),
    Panel(
        "Running sequences",
        [
            ("sum by (worker) (baton_running_sequences)", "{{worker}}"),
            ("max by (worker) (baton_max_sequences)", "{{worker}}: slots"),
        ],
    ),
    Panel(
        "Sequences decoded in a step",
        quantiles("baton_decode_batch_size", "worker", of=(50, 99)),
    ),
    Panel(
        "Step time",
        quantiles("baton_engine_step_seconds", "worker", of=(50, 99)),
        "s",
        "From launch to settled. On a decode worker this is the time between tokens.",
    ),
    Panel("Sampled tokens a second", [rate("baton_sampled_tokens", "worker")], stacked=True),
    Panel(
        "KV pages by state",
        [("sum by (worker, state) (baton_kv_pages)", "{{worker}} {{state}}")],
        stacked=True,
    ),
    Panel(
        "Preemptions",
        [rate("baton_preemptions", "worker")],
        "ops",
        "Sequences that left the batch because pages ran out. They are computed again.",
    ),
    Panel(
        "Time that stages compute",
        [
            (
                f"{rate('baton_rank_busy_seconds', 'worker', 'stage')[0]}"
                " / count by (worker, stage) (baton_rank_busy_seconds_total)",
                "{{worker}} stage {{stage}}",
            )
        ],
        "percentunit",
        "Of workers with several ranks, on CPUs. The stage that computes most bounds the others.",
    ),
    Panel(
        "Time that the fastest rank waits",
        [rate("baton_rank_skew_seconds", "worker")],
        "percentunit",
        "For the slowest one, at sums. Near 0 where ranks are alike.",
    ),
    Panel(
        "Rows of the fullest rank's experts",
        [
            (f"max by (worker, stage) ({PAIRS}) / avg by (worker, stage) ({PAIRS})", "{{worker}}"),
            (
                f"max by (model, role) (sum by (worker, model, role) ({PAIRS}))"
                f" / avg by (model, role) (sum by (worker, model, role) ({PAIRS}))",
                "{{model}} {{role}}",
            ),
        ],
        "none",
        "Over the mean of a worker's ranks, and of the workers of a model and role: those of an"
        " expert group wait for the fullest. 1 where experts are chosen evenly.",
    ),
    Panel(
        "GPUs",
        [("max by (worker) (baton_gpu_utilization_ratio)", "{{worker}}")],
        "percentunit",
        "Share of time in which some kernel ran. 1 means busy, not efficient.",
    ),
    Panel("GPU power", [("max by (worker) (baton_gpu_power_watts)", "{{worker}}")], "watt"),
    Panel(
        "GPU memory",
        [
            (
                "max by (worker) (baton_gpu_memory_used_bytes)"
                " / max by (worker) (baton_gpu_memory_total_bytes)",
                "{{worker}}",
            )
        ],
        "percentunit",
    ),
]

HANDOFF: Final = [
    Panel("Transfers", [rate("baton_kv_transfers", "outcome")], "ops"),
    Panel(
        "Sent",
        [rate("baton_kv_transfer_sent_bytes", "worker")],
        "Bps",
        stacked=True,
    ),
    Panel(
        "Exposed",
        quantiles("baton_kv_transfer_exposed_seconds", "transport"),
        "s",
        "From the last chunk computed to its push done: the delay that the hand-off adds.",
        limit=0.05,
    ),
    Panel(
        "First token to second",
        quantiles("baton_second_token_gap_seconds"),
        "s",
        "The pause after the first token, which a client sees.",
        limit=0.1,
    ),
    Panel(
        "Whole transfer",
        quantiles("baton_kv_transfer_seconds", "transport"),
        "s",
        "From the first push to the last one done. Most of it overlaps with compute.",
    ),
    Panel(
        "Descriptors a transfer",
        [
            (
                "sum by (worker) (rate(baton_kv_transfer_descriptors_total[1m]))"
                ' / sum by (worker) (rate(baton_kv_transfers_total{outcome="sent"}[1m]) > 0)',
                "{{worker}}",
            )
        ],
        help="Number after merging neighbours. Each costs some microseconds.",
    ),
    Panel(
        "Failures",
        [rate("baton_kv_transfer_failures", "cause")],
        "ops",
    ),
    Panel(
        "Quarantine",
        [
            ("sum by (worker) (baton_kv_transfers_quarantined)", "{{worker}}: transfers"),
            (
                'sum by (worker) (baton_kv_pages{state="quarantined"})',
                "{{worker}}: pages",
            ),
        ],
        help="Pages that a lost peer may still write. The peer's word or its death frees them.",
    ),
    Panel(
        "Fences at work",
        [
            (rate("baton_kv_stale_notifications", "worker")[0], "{{worker}}: stale"),
            (rate("baton_kv_grants_expired", "worker")[0], "{{worker}}: expired grants"),
        ],
        "ops",
        "Late or foreign messages that were dropped, and grants that nobody used.",
    ),
    Panel(
        "Transfers that do not end",
        [
            ("max by (worker) (baton_kv_quarantine_oldest_seconds)", "{{worker}}: quarantine"),
            ("max by (worker) (baton_kv_send_oldest_seconds)", "{{worker}}: send"),
        ],
        "s",
        "Age of the oldest. In a healthy cluster both end within milliseconds.",
        limit=60,
    ),
    Panel(
        "Paths between workers",
        [
            (
                "max by (worker, peer, transport) (baton_kv_peer_bytes_per_second)",
                "{{worker}} to {{peer}}: {{transport}}",
            )
        ],
        "Bps",
        "Bandwidth, measured when two workers met.",
    ),
    Panel(
        "Paths that routers avoid",
        [
            (
                "sum by (worker, peer, cause) (baton_kv_peer_healthy == 0) + 1",
                "{{worker}} to {{peer}}: {{cause}}",
            )
        ],
        help="1 while a path is avoided, by cause.",
    ),
    Panel(
        "Pushes in progress",
        [("sum by (worker) (baton_kv_sends_in_progress)", "{{worker}}")],
    ),
]

ADAPTERS: Final = [
    Panel(
        "Requests by adapter",
        [rate("baton_adapter_requests", "adapter")],
        "reqps",
        "Sixteen names, and `other`.",
        stacked=True,
    ),
    Panel(
        "Output tokens a second by adapter",
        [
            (
                'sum by (adapter) (rate(baton_adapter_tokens_total{kind="output"}[1m]))',
                "{{adapter}}",
            )
        ],
        stacked=True,
    ),
    Panel(
        "Failed requests by adapter",
        [
            (
                'sum by (adapter) (rate(baton_adapter_requests_total{outcome="failed"}[1m]))',
                "{{adapter}}",
            )
        ],
        "reqps",
    ),
    Panel(
        "Slots in use",
        [('sum by (worker) (baton_adapter_slots{state="used"})', "{{worker}}")],
        help="At a worker's number of slots, requests with other adapters wait.",
    ),
    Panel(
        "Wait for a slot",
        [
            (
                f"{rate('baton_adapter_slot_wait_seconds', 'worker')[0]}"
                f" / {rate('baton_adapter_slot_waits', 'worker')[0]}",
                "{{worker}}",
            )
        ],
        "s",
        "Mean, of requests that had to wait. None: no request waited.",
    ),
    Panel(
        "Adapters that come into slots, and leave them",
        [
            (rate("baton_adapter_loads", "worker")[0], "{{worker}} come"),
            (rate("baton_adapter_evictions", "worker")[0], "{{worker}} leave"),
        ],
        "ops",
        "Steadily high: more adapters are in demand than there are slots (`debug.max_adapters`).",
    ),
]

OBJECTIVES: Final = [
    Panel(
        "First token within 0.5 s",
        [("baton:ttft_met:ratio5m", "5 min"), ("baton:ttft_met:ratio1h", "1 h")],
        "percentunit",
        "The objective is 95 %. recording.yml has its threshold.",
        limit=0.95,
    ),
    Panel(
        "At most 50 ms a token",
        [("baton:tpot_met:ratio5m", "5 min"), ("baton:tpot_met:ratio1h", "1 h")],
        "percentunit",
        "The objective is 95 %.",
        limit=0.95,
    ),
    Panel(
        "Goodput",
        [("baton:goodput:rate5m", "met both"), ("sum(baton:requests:rate1m)", "all")],
        "reqps",
        "Requests a second that met both objectives: a lower bound.",
    ),
    Panel("Time to first token", quantiles(TTFT), "s", exemplars=True, limit=0.5),
    Panel("Time per output token", quantiles(TPOT), "s", exemplars=True, limit=0.05),
    Panel(
        "First tokens, spread",
        [(f"sum by (le) (increase({TTFT}_bucket[1m]))", "{{le}}")],
        "s",
        kind="heatmap",
        exemplars=True,
    ),
    Panel("Whole requests", quantiles(DURATION), "s", exemplars=True),
    Panel("Time between messages", quantiles("baton_inter_token_seconds"), "s"),
    Panel(
        "Failed through our own fault",
        [("baton:own_faults:rate5m", "{{outcome}}")],
        "reqps",
    ),
    Panel(
        "Spans",
        [rate("baton_spans", "outcome")],
        "ops",
        "Dropped or failed spans leave holes in traces.",
    ),
]

DASHBOARDS: Final = {
    "overview": ("Baton: overview", OVERVIEW),
    "balance": ("Baton: prefill and decode", BALANCE),
    "handoff": ("Baton: hand-off", HANDOFF),
    "adapters": ("Baton: adapters", ADAPTERS),
    "objectives": ("Baton: objectives", OBJECTIVES),
}


def write(folder: Path) -> None:
    """Writes all dashboards as JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    for uid, (title, panels) in DASHBOARDS.items():
        text = json.dumps(dashboard(uid, title, panels), indent=1, ensure_ascii=False)
        (folder / f"{uid}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
