"""Breaks the product on purpose, one fault at a time, and shows which test catches each.

python tests/breakages.py                      all of `BREAKAGES`
python tests/breakages.py NAME [NAME ...]      some of them
python tests/breakages.py --list               their names and rules
python tests/breakages.py --jobs 2             so many at a time, 1 if not said

A fault is one text of one file that is replaced by another, in a copy of the working tree. Then the
test files that are to catch it run in that copy, until the first test fails. The text must stand in
the file exactly once: who moves or rewrites it changes the entry here.

The exit status is 0 if each fault was caught. A run that ended without a failed test, such as one
whose files could not be read, has caught nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 400
"""Of the tests of one fault. What takes longer has not caught it."""
FAILED = 1
"""pytest's status where tests failed."""


@dataclass(frozen=True, slots=True)
class Breakage:
    """One deliberate fault."""

    name: str
    rule: str
    """What is broken."""
    file: str
    """Of the product, from the root."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Files of `tests/`. One of them has the test of the rule; the quickest comes first."""


class Outcome(NamedTuple):
    """What became of a fault."""

    breakage: Breakage
    caught_by: str
    """The test that failed; "" if none did."""
    seconds: float
    why_not: str = ""


BREAKAGES = (
    # -- engine ---------------------------------------------------------------------------------
    Breakage(
        "page-keyed-early",
        "a page gets its key before the KV of its last token is there",
        "engine/schedule/requests.py",
        "self._ended.append((active, outputs[:-1], pages, others))",
        "self._ended.append((active, outputs, pages, others))",
        ("engine/test_scheduler_property.py",),
    ),
    Breakage(
        "slot-leaked",
        "a cancelled request keeps its slot",
        "engine/schedule/requests.py",
        "                self._batch.others.release(self._batch.others.take(sequence.slot))\n"
        "                self._batch.leave(sequence)\n",
        "                self._batch.others.release(self._batch.others.take(sequence.slot))\n",
        ("engine/test_scheduler_property.py",),
    ),
    Breakage(
        "changed-mask-let-pass",
        "a class of transformers that changes its mask runs with a causal one",
        "engine/model/wrapped/recording.py",
        "        if id(mask) not in self._masks:\n",
        "        if id(mask) not in self._masks:\n            return None\n",
        ("engine/test_wrapped_refused.py",),
    ),
    Breakage(
        "window-let-go-early",
        "a page behind a window goes while the step in flight reads it",
        "engine/groups/window.py",
        "first = np.maximum((num_tokens - 1) // self._size - self._before, 0)",
        "first = np.maximum((num_tokens - 1) // self._size - self._before + 2, 0)",
        ("engine/test_scheduler_property.py",),
    ),
    Breakage(
        "hit-without-window",
        "a prompt goes on from pages of which a window lacks its own",
        "engine/groups/window.py",
        "            if run >= self._before:\n",
        "            if run >= self._before - 1:\n",
        ("engine/test_groups.py",),
    ),
    Breakage(
        "stale-state-answers",
        "nobody compares the stamp of a state with the length of its sequence",
        "engine/attention/recurrent/states.py",
        "spoilt = (stamps != tokens[:, None]).any(1)",
        "spoilt = (stamps < 0).any(1)",
        ("engine/test_states.py",),
    ),
    Breakage(
        "wrong-state-stays-cached",
        "a cached state that is not that of its tokens is found again and again",
        "engine/schedule/recovery.py",
        "                group.blocks.drop(key)\n",
        "",
        ("engine/test_states.py",),
    ),
    Breakage(
        "state-kept-one-page-early",
        "a state that is kept has the key of the page before its own",
        "engine/groups/state.py",
        "            index = tokens // self._size - 1\n",
        "            index = tokens // self._size - 2\n",
        ("engine/test_states.py",),
    ),
    Breakage(
        "prompt-cut-off-the-grid",
        "a prompt is cut where the numbers of its state depend on the cut",
        "engine/schedule/planning.py",
        "                end -= end % config.chunk_tokens\n",
        "                end -= end % config.page_size\n",
        ("engine/test_states.py",),
    ),
    Breakage(
        "preempted-loses-a-token",
        "a preempted sequence goes on without its last token",
        "engine/schedule/requests.py",
        "sequence.append(slots.output_ids(slot)[len(sequence.outputs) :])",
        "sequence.append(slots.output_ids(slot)[len(sequence.outputs) : -1])",
        ("engine/test_scheduler_property.py",),
    ),
    Breakage(
        "row-of-another-sequence",
        "a token of a sequence that has left its slot goes to the next one there",
        "engine/schedule/batch.py",
        "return np.asarray(current == plan.sample_generations, np.bool_)",
        "return np.ones(len(current), np.bool_)",
        ("engine/test_scheduler_property.py",),
    ),
    Breakage(
        "parted-page-not-copied",
        "sequences that part within a page both write into it",
        "engine/schedule/batch.py",
        "            self._copies[int(own[-1])] = int(pages[-1])\n",
        "",
        ("engine/test_beams.py",),
    ),
    Breakage(
        "beam-keeps-its-own-page",
        "a beam that goes on from another one reads its own last tokens",
        "engine/sampling/beams.py",
        "pool.copy_pages(pages[parents], pages)",
        "pool.copy_pages(pages, pages)",
        ("engine/test_beams.py",),
    ),
    Breakage(
        "beam-reads-former-pages",
        "a step that was planned before its beams were chosen reads their former pages",
        "engine/schedule/choosing.py",
        "full = position // size if follows else 0",
        "full = 0",
        ("engine/test_beams.py",),
    ),
    Breakage(
        "lane-takes-a-row-in-flight",
        "a sequence has more steps in flight than run beside each other, and one",
        "engine/step/lanes.py",
        "ready = flying <= _LOOKAHEAD",
        "ready = flying >= 0",
        ("engine/test_stages.py",),
    ),
    Breakage(
        "layers-of-a-stage-from-the-first",
        "a stage's layers are handed off as if they were the first ones of the page",
        "kv_transfer/ranks/plan.py",
        "(layer - band.start) * planes[plane]",
        "0 * planes[plane]",
        ("kv_transfer/test_kv_ranks.py",),
    ),
    Breakage(
        "draft-behind-a-wrong-one",
        "a draft counts though one before it was not the token drawn",
        "engine/speculation/tables.py",
        "agrees = (tokens[:, :-1] == ids[:, 1:]).long().cumprod(1).sum(1)",
        "agrees = (tokens[:, :-1] == ids[:, 1:]).long().sum(1)",
        ("engine/test_speculation_sampled.py",),
    ),
    Breakage(
        "columns-share-noise",
        "all tokens of a verified step are drawn with the first one's number",
        "engine/sampling/sampler.py",
        "], plan, own, draws.indices + column, alive",
        "], plan, own, draws.indices, alive",
        ("engine/test_speculation_sampled.py",),
    ),
    Breakage(
        "tokens-behind-an-end",
        "a sequence goes on behind the token of a verified step that ends it",
        "engine/schedule/settling.py",
        "            drawn = drawn.until(ends)\n",
        "            pass\n",
        ("engine/test_speculation.py",),
    ),
    Breakage(
        "reserve-forgotten",
        "no page is kept back for the growth of running sequences",
        "engine/schedule/admission.py",
        "        return max(self.growth_reserve(wanted), largest)\n",
        "        return largest\n",
        ("engine/test_admission.py",),
    ),
    Breakage(
        "stop-too-early",
        "an end counts one token before `min_tokens`",
        "engine/stopping.py",
        "    if index >= stop.min_tokens:",
        "    if index + 1 >= stop.min_tokens:",
        ("engine/test_sampling_stopping.py",),
    ),
    Breakage(
        "prefix-hit-too-long",
        "a prompt is found in the cache to its last token, so none is left to compute",
        "engine/pages/prefix.py",
        "    complete = (len(tokens) - 1) // config.page_size\n"
        "    if len(known) >= complete:  # The usual case for a request that waits.\n"
        "        return list(known[:complete])\n"
        "    return request_keys(config, request, tokens[:-1], known)",
        "    return request_keys(config, request, tokens, known)",
        ("engine/test_prompt_keys.py", "engine/test_scheduler_property.py"),
    ),
    Breakage(
        "page-reused-under-a-write",
        "a freed page is given out while a step may still write it",
        "engine/pages/blocks.py",
        "        written = self._last_writer[left] > self._settled_step",
        "        written = self._last_writer[left] > self._settled_step + 1",
        ("engine/test_blocks_stateful.py", "engine/test_scheduler_property.py"),
    ),
    Breakage(
        "head-evicted-first",
        "the head of a prompt is evicted before its tail",
        "engine/pages/blocks.py",
        "        left = pages[self._refcount[pages] == 0][::-1]",
        "        left = pages[self._refcount[pages] == 0]",
        ("engine/test_eviction.py", "engine/test_blocks_stateful.py"),
    ),
    Breakage(
        "eviction-not-reported",
        "routers hear of pages that come, and not of those that go",
        "engine/pages/prefix.py",
        "    blocks.subscribe(left, (CacheEventKind.EVICTED,))\n",
        "",
        ("engine/test_report_pages.py",),
    ),
    Breakage(
        "fp8-scale-off",
        "the exponent of a row of FP8 is one too small just above a power of two times 448",
        "engine/pool/fp8_rounding.py",
        "((bits & 0x7FFFFF) > 0x600000)",
        "((bits & 0x7FFFFF) > 0x680000)",
        ("engine/test_kv_pool.py", "engine/test_engine_fp8_kv.py"),
    ),
    Breakage(
        "command-lost-in-the-loop",
        "a command that comes as a step is about to end is dropped",
        "engine/loop/step_loop.py",
        "                self._held.append(command)",
        "                pass",
        ("engine/test_pacing.py",),
    ),
    Breakage(
        "steps-freed-by-the-garbage-collector",
        "a step that was settled refers to itself, and lives until garbage is collected",
        "engine/loop/step_loop.py",
        "        del flight.launched\n",
        "",
        ("engine/test_step_garbage.py",),
    ),
    Breakage(
        "late-row-drawn-behind-itself",
        "a row that came late begins its next step with its first token again",
        "engine/loop/late.py",
        "        batch.is_written(row.slot)\n",
        "",
        ("engine/test_late_property.py",),
    ),
    Breakage(
        "granted-pages-freed-by-a-failed-step",
        "a step without memory preempts who waits for KV in a slot that it had written for another",
        "engine/schedule/recovery.py",
        "running.intersection(plan.write_slots.tolist())",
        "set(plan.write_slots.tolist())",
        ("engine/test_late_property.py",),
    ),
    Breakage(
        "failed-step-swallowed",
        "a step that failed is logged, and its requests wait for ever",
        "engine/loop/step_loop.py",
        "            self._scheduler.recovery.recover(plan, error)\n",
        "",
        ("engine/test_step_observer.py",),
    ),
    Breakage(
        "mask-off-by-one",
        "a bad word's neighbour in the vocabulary is forbidden in its place",
        "engine/masks/rules.py",
        "    word, bit = divmod(token_id, 32)",
        "    word, bit = divmod(token_id + 1, 32)",
        ("engine/test_engine_structure.py",),
    ),
    Breakage(
        "end-of-a-form-too-early",
        "a restricted request may end one token before `min_tokens`",
        "engine/masks/rules.py",
        "        if index < self._least and",
        "        if index + 1 < self._least and",
        ("engine/test_engine_structure.py",),
    ),
    Breakage(
        "future-attended",
        "a prompt's later chunk sees one token of the future",
        "engine/attention/sdpa.py",
        "        hidden = at > own\n",
        "        hidden = at > own + 1\n",
        ("engine/test_attention.py",),
    ),
    Breakage(
        "noise-shared-by-choices",
        "all choices of a request draw the same tokens",
        "engine/sampling/noise.py",
        "counters[0], counters[1] = indices, choices",
        "counters[0], counters[1] = indices, 0 * choices",
        ("engine/test_noise.py",),
    ),
    Breakage(
        "top-p-one-too-few",
        "top-p leaves out the token that reaches its share",
        "engine/sampling/ops.py",
        "    kept &= gone_by - mass < top_p[:, None] * whole",
        "    kept &= gone_by < top_p[:, None] * whole",
        ("engine/test_sampling_options.py", "engine/test_sampling_draws.py"),
    ),
    Breakage(
        "failed-load-counts",
        "pages whose load from a tier failed are used",
        "engine/tiers/tiers.py",
        "        good = not (load.late or load.failed)",
        "        good = not load.late",
        ("engine/test_tiers.py", "engine/test_tiers_engine.py"),
    ),
    Breakage(
        "rank-failure-swallowed",
        "a copy counts as done though another rank could not make its part",
        "engine/ranks/copies.py",
        "answers, 1) if answer != DONE]",
        "answers, 1) if not answer]",
        ("engine/test_movers.py",),
    ),
    Breakage(
        "minor-refused",
        "a router or worker refuses one that is a minor protocol number ahead",
        "serving/release.py",
        "theirs.major == PROTOCOL.major",
        "theirs == PROTOCOL",
        ("worker/test_worker_stream.py",),
    ),
    Breakage(
        "major-taken",
        "a router takes a worker of another major protocol number",
        "serving/release.py",
        "theirs.major == PROTOCOL.major",
        "theirs.major != 0",
        ("router/test_served_errors.py",),
    ),
    # -- hand-off -------------------------------------------------------------------------------
    Breakage(
        "grant-not-fenced",
        "a write for another life of the decode worker counts",
        "kv_transfer/receiving.py",
        "        if from_agent != spec.peer or chunk.decode_epoch != self._epoch:\n",
        "        if from_agent != spec.peer:\n",
        ("kv_transfer/test_kv_faults.py",),
    ),
    Breakage(
        "coverage-off-by-one",
        "a prompt counts as delivered with one page missing",
        "kv_transfer/receiving.py",
        "            covered == _bits(*self.range_of(group)) for",
        "            covered.bit_count() + 1 >= _bits(*self.range_of(group)).bit_count() for",
        ("kv_transfer/test_kv_property.py",),
    ),
    Breakage(
        "ready-without-a-group",
        "a prompt counts as delivered while the pages of its windows are under way",
        "kv_transfer/receiving.py",
        "for group, covered in enumerate(self.covered)\n        )",
        "for group, covered in enumerate(self.covered[:1])\n        )",
        ("kv_transfer/test_kv_groups.py",),
    ),
    Breakage(
        "half-a-resume-point",
        "pages of group 0 come from host memory without those of the windows",
        "engine/tiers/grouped.py",
        "        return self._groups.resumable(keys, self._first.count_leading(keys), has)\n",
        "        return self._first.count_leading(keys)\n",
        ("engine/test_tiers_groups.py",),
    ),
    Breakage(
        "half-a-fetch",
        "a worker gives pages of group 0 to a peer without those of a window",
        "engine/tiers/peers.py",
        "            if len(pages) > 1 and any(map(_is_shorter, pages, brought.keys)):\n",
        "            if not brought.keys:\n",
        ("engine/test_peer_fetches.py", "fetch_service/test_fetch_service.py"),
    ),
    Breakage(
        "held-is-usable",
        "the router counts all that a worker holds of a prompt, whatever windows it has lost",
        "prefixes/index.py",
        "        if bits & mask:\n",
        "        if bits:\n",
        ("prefixes/test_follow_property.py",),
    ),
    Breakage(
        "quarantine-ends-by-time",
        "pages under quarantine are free before their peer has quiesced",
        "kv_transfer/receiving.py",
        "            if receive.state is ReceiveState.QUARANTINED:\n"
        "                self._ask(receive)",
        "            if receive.state is ReceiveState.QUARANTINED:\n"
        "                self._free(receive)",
        ("kv_transfer/test_kv_faults.py",),
    ),
    Breakage(
        "no-tombstone",
        "a grant that comes after its abort is served",
        "kv_transfer/sending.py",
        "            self._tombstones.add(transfer_id, SendState.QUIESCED)\n"
        "        self._emit(SendQuiesced(transfer_id))",
        "            pass\n        self._emit(SendQuiesced(transfer_id))",
        ("kv_transfer/test_kv_handoff.py",),
    ),
    Breakage(
        "page-sent-before-it-is-final",
        "a page is sent while its last tokens are still computed",
        "kv_transfer/outgoing.py",
        "        end = self.end_token // spec.page_size_tokens\n",
        "        end = -(-self.end_token // spec.page_size_tokens)\n",
        ("kv_transfer/test_kv_property.py",),
    ),
    # -- services of a worker -------------------------------------------------------------------
    Breakage(
        "grant-of-a-stranger",
        "a prefill worker writes to another peer than its Submit named",
        "prefill_service/outgoing.py",
        "            and grant.decode_agent_name == peer\n",
        "",
        ("prefill_service/test_prefill_service.py",),
    ),
    Breakage(
        "freed-under-a-write",
        "a decode worker frees granted pages at once, and not at the end of their quarantine",
        "decode_service/service.py",
        "        leg.quarantined_s = self._legs.clock()\n        self._engine.cancel(leg.id)\n",
        "        leg.quarantined_s = self._legs.clock()\n        self._engine.cancel(leg.id)\n"
        "        self._engine.release(leg.id)\n",
        ("decode_service/test_decode_service.py",),
    ),
    Breakage(
        "old-refusal-counts",
        "a refusal of another life's fetch frees pages that may still be written",
        "fetch_service/fetching.py",
        "        if fetch is None or refused.fetcher_epoch != self._epoch:",
        "        if fetch is None:",
        ("fetch_service/test_fetch_service.py",),
    ),
    Breakage(
        "broken-event-swallowed",
        "a leg whose handler broke is logged, and waits for ever",
        "worker_base/legs.py",
        "            if self._legs.get(leg.id) is leg:\n                self._give_up(leg)\n",
        "",
        ("worker_base/test_worker_broken_events.py",),
    ),
    Breakage(
        "tokens-uncounted-in-the-outbox",
        "a step's tokens for a slow router count as one entry",
        "worker_base/outbox.py",
        "        self._entries += _entries_of(message)",
        "        self._entries += 1",
        ("worker_base/test_worker_outbox.py",),
    ),
    Breakage(
        "announced-step-counts-as-hung",
        "a worker ends itself in a long step that it announced",
        "worker/watchdog.py",
        "        step_s = allowed_s + load.long_step_ms / 1e3",
        "        step_s = allowed_s",
        ("worker/test_worker_watchdog.py",),
    ),
    # -- prefixes -------------------------------------------------------------------------------
    Breakage(
        "tenants-share-pages",
        "a tenant's pages are found by another",
        "prefixes/keys.py",
        'own = kv_precision.encode() + b"\\0" + cache_salt',
        'own = kv_precision.encode() + b"\\0"',
        ("engine/test_scheduler_property.py",),
    ),
    Breakage(
        "adapters-share-pages",
        "pages of one adapter are found by another",
        "prefixes/keys.py",
        'return b"\\1" + adapter + own if adapter else own',
        "return own",
        ("router/test_router_adapters.py", "engine/test_adapters.py"),
    ),
    Breakage(
        "adapter-anywhere",
        "work goes to workers without the request's adapter",
        "router/workers/link.py",
        "return not model.digest or model.digest in self.adapter_bytes",
        "return True",
        ("router/test_router_adapters.py",),
    ),
    Breakage(
        "expert-of-another-rank",
        "a rank adds what it has not computed, of experts that another one holds",
        "engine/model/experts/routing.py",
        "own = chosen.experts % which.ranks == which.rank",
        "own = chosen.experts >= 0",
        ("engine/test_expert_parallel.py",),
    ),
    Breakage(
        "witness-from-afar",
        "somebody on another host says that processes have ended",
        "router/deaths/witness.py",
        "here = [process for process in ended if _is_on(process, host)]",
        "here = list(ended)",
        ("hosts/test_witness.py",),
    ),
    Breakage(
        "lost-and-forgotten",
        "a router that is started again does not learn of workers that were lost before",
        "router/workers/between.py",
        "elif self._deaths.asked(name, question.prefill_processes):",
        "elif False:",
        ("router/test_router_deaths.py",),
    ),
    Breakage(
        "rank-of-nobody",
        "whoever has some key hears the steps of a worker on several hosts",
        "engine/hosts/wires.py",
        "return key.decode() in self._known",
        "return True",
        ("hosts/test_wires.py",),
    ),
    Breakage(
        "group-of-two-models",
        "workers with other weights hold experts together",
        "engine/expert_groups/leader.py",
        "if len(set(self._loaded.values())) > 1:",
        "if False:",
        ("engine/test_expert_groups.py",),
    ),
    Breakage(
        "stopped-in-a-group",
        "workers of an expert group wait for one that is stopped",
        "engine/expert_groups/leader.py",
        "if (rank := self._stopped.look(self._pids, STOPPED_S)) is not None:",
        "if (rank := self._stopped.look({}, STOPPED_S)) is not None:",
        ("engine/test_expert_groups_ends.py",),
    ),
    Breakage(
        "adapter-slot-in-use",
        "a slot that a sequence uses gets another adapter",
        "engine/adapters/slots.py",
        "digest = next(each for each in self._slot_of if not self._users[each])",
        "digest = next(iter(self._slot_of))",
        ("engine/test_adapters_bad.py",),
    ),
    Breakage(
        "adapter-slots-ignored",
        "prompts go past workers that have their adapter in a slot",
        "router/placement/cost.py",
        "load_s = slot_s(worker, digest) if digest else 0.0",
        "load_s = 0.0",
        ("router/test_adapter_places.py",),
    ),
    Breakage(
        "adapters-share-stored-pages",
        "pages of one adapter in a tier are found by another",
        "engine/pages/prefix.py",
        "salt_of(config.kv_precision, request.cache_salt, request.adapter)",
        "salt_of(config.kv_precision, request.cache_salt)",
        ("engine/test_adapters_stores.py",),
    ),
    Breakage(
        "another-tenants-adapter",
        "a tenant may use what it is not bound to",
        "router/visible.py",
        "return self._names is None or name in self._names",
        "return True",
        ("router/test_visible.py",),
    ),
    Breakage(
        "adapter-outside-its-folder",
        "an adapter is loaded from outside of the folder that bounds it",
        "worker_base/adapters.py",
        "    if not found.is_relative_to(root):",
        "    if False:",
        ("e2e/test_e2e_adapters.py",),
    ),
    Breakage(
        "gap-in-the-events-unseen",
        "a router that missed events goes on as if it had them",
        "prefixes/follower.py",
        "        if events.first != self._next.next_sequence or not events.kinds:",
        "        if not events.kinds:",
        ("router/test_holdings.py", "prefixes/test_follow_property.py"),
    ),
    Breakage(
        "index-counts-one-too-many",
        "a holder that lost a page is thought to hold it",
        "prefixes/index.py",
        "runs.append((depth, was[0] & ~pool, was[1] & ~any_tier))",
        "runs.append((depth + 1, was[0] & ~pool, was[1] & ~any_tier))",
        ("router/test_holdings.py", "prefixes/test_follow_property.py"),
    ),
    # -- router ---------------------------------------------------------------------------------
    Breakage(
        "token-0-twice",
        "a client gets the first token from both workers",
        "router/dispatch/merge.py",
        "_without_first(run, len(self.token_ids) - run.first_index)",
        "_without_first(run, 0)",
        ("router/test_router_merge.py",),
    ),
    Breakage(
        "retry-forgets-what-was-sent",
        "an attempt that goes on begins the answer anew",
        "router/dispatch/job_run.py",
        "        if not self.run.started:\n            return []\n        return [list(",
        "        if self.run.started:\n            return []\n        return [list(",
        ("router/test_dispatch_failover.py",),
    ),
    Breakage(
        "message-of-a-closed-leg",
        "a worker that has no part in an attempt any more is heard",
        "router/dispatch/attempt.py",
        "        if self.phase is Phase.ENDED or leg is None or not leg.open:",
        "        if self.phase is Phase.ENDED or leg is None:",
        ("router/test_dispatch_failures.py",),
    ),
    Breakage(
        "tenant-counted-twice",
        "a job takes two parts of its tenant's quota",
        "router/quotas.py",
        "self._usage.setdefault(job.tenant, _Usage()).add(job, 1)\n",
        "self._usage.setdefault(job.tenant, _Usage()).add(job, 2)\n",
        ("router/test_dispatch_shares.py",),
    ),
    Breakage(
        "quota-not-given-back",
        "a job that is over still counts for its tenant",
        "router/dispatch/dispatcher.py",
        "            self.quotas.leave(job)\n",
        "",
        ("router/test_dispatch_shares.py",),
    ),
    Breakage(
        "absent-tenant-saves-up",
        "a tenant that comes back goes before all who stayed",
        "router/dispatch/queue.py",
        "        self._floor = self._given[entry.tenant]\n",
        "",
        ("router/test_dispatch_shares.py", "router/test_dispatch_queue.py"),
    ),
    Breakage(
        "reservation-counted-twice",
        "an attempt counts beside the load report that contains it",
        "router/workers/load_estimate.py",
        "                self._fresh = self._fresh.less(entry.reservation)\n\n    def reserve(",
        "                pass\n\n    def reserve(",
        ("router/test_router_link.py", "router/test_load_estimate.py"),
    ),
    Breakage(
        "placement-forgets-the-cache",
        "a prompt that a worker holds costs as much there as elsewhere",
        "router/placement/cost.py",
        "        cached = min(pages * demand.model.page_size_tokens, tokens - 1)\n",
        "        cached = 0 * min(pages * demand.model.page_size_tokens, tokens - 1)\n",
        ("router/test_cost.py",),
    ),
    Breakage(
        "seed-not-passed",
        "a client's seed is replaced by a drawn one",
        "router/requests/filling.py",
        'seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64)',
        "seed=secrets.randbits(64)",
        ("router/test_router_validation.py", "router/test_openai_fields.py"),
    ),
    Breakage(
        "lists-uncounted",
        "a body of a million empty lists is parsed",
        "router/requests/bounds.py",
        '    if data.count(b"{") + data.count(b"[") > most:',
        '    if data.count(b"{") > most:',
        ("router/test_shape_http.py",),
    ),
    Breakage(
        "any-scheme-lets-in",
        "a token behind another scheme than Bearer lets its caller in",
        "router/doors/auth.py",
        " if scheme.lower() == _SCHEME else None",
        "",
        ("router/test_auth.py",),
    ),
    Breakage(
        "frames-without-a-need",
        "at the fast door frames that a client has no need of come out of no allowance",
        "router/doors/http2/frames.py",
        "not is_needed and not self._allowance.spend()",
        "not is_needed and self._allowance.spend() is None",
        ("router/test_fast_door_abuse.py",),
    ),
    Breakage(
        "calls-begun-and-dropped",
        "at the fast door a client may begin and drop any number of calls",
        "router/doors/http2/connection.py",
        'raise FrameError(ErrorCodes.ENHANCE_YOUR_CALM, "resets")',
        "pass",
        ("router/test_fast_door_abuse.py",),
    ),
    Breakage(
        "window-of-a-connection",
        "at the fast door data is not taken from the window of its connection",
        "router/doors/http2/outgoing.py",
        "self._h2.outbound_flow_control_window -= size",
        "self._h2.outbound_flow_control_window -= 0",
        ("router/test_fast_door.py",),
    ),
    Breakage(
        "stop-text-in-two-pieces",
        "a stop text that came in two pieces is not found",
        "router/answers/detokenization.py",
        "text.find(stop, max(0, held + 1 - len(stop)))",
        "text.find(stop, held)",
        ("router/test_router_detokenization.py",),
    ),
    Breakage(
        "required-call-left-out",
        "an answer that must call a function may have another form",
        "router/structure/grammar.py",
        '"calls" if rules.required or not self._has_form else "calls | form"',
        '"calls" if not self._has_form else "calls | form"',
        ("router/test_openai_forms.py",),
    ),
    # -- clients, console, telemetry ------------------------------------------------------------
    Breakage(
        "tls-name-not-checked",
        "a server of another name is trusted",
        "baton/tls.py",
        "            trust(context, self.ca)\n",
        "            context.check_hostname = False\n            trust(context, self.ca)\n",
        ("serving/test_tls.py",),
    ),
    Breakage(
        "dropped-stream-goes-on",
        "a client that leaves its stream lets the generation go on",
        "baton/client/streams.py",
        "    def __exit__(self, *_: object) -> None:\n        self.close()",
        "    def __exit__(self, *_: object) -> None:\n        pass",
        ("baton/test_client.py",),
    ),
    Breakage(
        "failed-requests-count-as-good",
        "the goodput of `baton bench` has requests that failed",
        "console/loadgen/report/summary.py",
        "        if not outcome.ok:\n            return False\n",
        "",
        ("console/test_bench_figures.py",),
    ),
    Breakage(
        "mean-from-the-cache",
        "the mean of a prompt's hidden states lacks those that the prefix cache has",
        "engine/types.py",
        "return self.prompt_logprobs or (self.pooling is not None and self.pooling.reads_all)",
        "return self.prompt_logprobs",
        ("engine/test_pooling.py",),
    ),
    Breakage(
        "batch-line-twice",
        "a batch that goes on runs lines again that have a result",
        "router/batching/running.py",
        "        return custom_id is None\n",
        "        return True\n",
        ("console/test_batch.py",),
    ),
    Breakage(
        "embedding-wants-decode",
        "a prompt that is pooled waits for a decode worker",
        "router/jobs.py",
        "        return self.searches or self.max_tokens > 1",
        "        return self.searches or self.max_tokens != 1",
        ("e2e/test_e2e_pooling.py",),
    ),
    Breakage(
        "work-for-who-leaves-a-role",
        "a worker that changes its role gets new work of the old one",
        "router/workers/link.py",
        "        return self.estimate.draining or bool(self.next_role)",
        "        return self.estimate.draining",
        ("router/test_router_roles.py",),
    ),
    Breakage(
        "asked-role-forgotten",
        "two changes of roles in quick succession leave no worker of a role",
        "router/workers/roles.py",
        "    return link.asked.role or link.next_role or link.identity.role",
        "    return link.next_role or link.identity.role",
        ("router/test_router_roles.py",),
    ),
    Breakage(
        "last-of-a-kind-moved",
        "the balance takes the last worker of a pool",
        "router/workers/balance.py",
        "        if not may or len(pool) < 2:",
        "        if not may:",
        ("router/test_balance.py",),
    ),
    Breakage(
        "unsampled-trace-recorded",
        "a caller's decision against a trace is not passed on",
        "telemetry/tracing.py",
        "    flags = span.trace_flags & TraceFlags.SAMPLED",
        "    flags = TraceFlags.SAMPLED",
        ("telemetry/test_telemetry_tracing.py", "telemetry/test_telemetry_rpc.py"),
    ),
)
_ticks = count(1)


def break_it(breakage: Breakage, tree: Path) -> str:
    """Writes the fault into a tree, and returns the file's text without it.

    Raises:
        ValueError: the text to replace does not stand in the file exactly once.
    """
    path = tree / breakage.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if (found := text.count(breakage.old)) != 1:
        where = f"{breakage.file} has its text {found} times" if text else "its file is gone"
        raise ValueError(f"{breakage.name}: {where}; the entry in tests/breakages.py must follow")
    _write(path, text.replace(breakage.old, breakage.new))
    return text


def _write(path: Path, text: str) -> None:
    """Writes a file whose time differs from all it had: Python compares only seconds."""
    path.write_text(text, encoding="utf-8")
    later = time.time() + 10 * next(_ticks)
    os.utime(path, (later, later))


def copy_tree(target: Path) -> None:
    """Copies what git knows or would add."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source = ROOT / name
        if source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def try_one(breakage: Breakage, tree: Path) -> Outcome:
    """Breaks a tree, runs the tests, and mends it."""
    began_s = time.monotonic()
    whole = break_it(breakage, tree)
    try:
        caught_by, why_not = _run(breakage.tests, tree)
    finally:
        _write(tree / breakage.file, whole)
    return Outcome(breakage, caught_by, time.monotonic() - began_s, why_not)


def _run(tests: Iterable[str], tree: Path) -> tuple[str, str]:
    """The test that failed and "", or "" and why there is none."""
    files = [f"tests/{name}" for name in tests]
    if missing := [name for name in files if not (tree / name).exists()]:
        return "", f"there is no {missing[0]}"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "--timeout=60"]
    environment = {**os.environ, "CI": "true", "PYTHONPATH": str(tree)}
    try:
        run = subprocess.run(
            [*command, "-p", "no:cacheprovider", *files],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        return "", f"its tests took more than {LONGEST_S} s"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if failed and run.returncode == FAILED:
        return failed[1], ""
    return "", f"pytest ended with {run.returncode}: {run.stdout.strip().splitlines()[-1:]}"


def run(breakages: Iterable[Breakage], jobs: int) -> list[Outcome]:
    """Tries faults, `jobs` at a time, each in a tree of its own. Tells each outcome."""
    with tempfile.TemporaryDirectory(prefix="breakages-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            copy_tree(Path(folder, str(job)))
            trees.put(Path(folder, str(job)))

        def one(breakage: Breakage) -> Outcome:
            tree = trees.get()
            try:
                outcome = try_one(breakage, tree)
            except ValueError as error:
                outcome = Outcome(breakage, "", 0.0, str(error))
            finally:
                trees.put(tree)
            told = outcome.caught_by or f"NOT CAUGHT: {outcome.why_not}"
            print(f"{breakage.name:32} {outcome.seconds:5.0f} s  {told}", flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, breakages))


def main() -> int:
    """Tries the faults that the arguments name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = {breakage.name: breakage for breakage in BREAKAGES}
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault; none: all")
    parser.add_argument("--list", action="store_true", help="show names and rules")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in arguments.names] or list(BREAKAGES)
    if arguments.list:
        for breakage in chosen:
            print(f"{breakage.name:32} {breakage.file:42} {breakage.rule}")
        return 0
    began_s = time.monotonic()
    outcomes = run(chosen, arguments.jobs)
    caught = sum(bool(outcome.caught_by) for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} caught in {time.monotonic() - began_s:.0f} s")
    return int(caught < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
