"""Runs the fused forward pass in Triton's interpreter, with kernels of our own for attention,
against `engine.model.decoder` on the same weights; and counts its kernels.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported. Arguments: a
scratch folder, then cases.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import flash_attn_like
import interpreted_ptx
import numpy as np
import torch
from halved_layers import halved
from interpreted_kernels import convert_as_a_gpu_does
from quantised_experts import write_mxfp4
from test_attention import FEATURES, MIXES, SEVERAL, Row
from test_attention import check as check_rows
from test_model_logits import Runner, load
from tiny_families import EVERY, FUSED, LATENTS
from tiny_models import write_tiny_model
from tiny_wrapped import PATHS, WRAPPED
from torch import Tensor
from triton.runtime import interpreter

from engine.attention.grouped import GroupEnds, Member, PagedGroups
from engine.attention.latents import LatentBackend
from engine.attention.paged import PagedStep
from engine.attention.recurrent.short_conv import ShortConvBackend
from engine.attention.triton import TritonBackend
from engine.cuda.decode_attention import decode_attention
from engine.cuda.hooks.choosing import ChosenAttention
from engine.cuda.hooks.hooked import Hooked
from engine.cuda.kv.latent_decode import decode_latents
from engine.cuda.kv.latent_prompt import prompt_latents
from engine.cuda.kv.prompt_attention import prompt_attention
from engine.cuda.mixers.base import RowEnds
from engine.cuda.wrapped import forward_of
from engine.groups.spec import GroupSpec, Plane, Window, name_of, split_layers
from engine.hooks.attention import Attend
from engine.hooks.steps import StepHooks
from engine.model import LoadedModel
from engine.model.precision.choice import Precision
from engine.pool.kinds import maker
from engine.pool.kv_pool import KvPool, PlainPool
from engine.pool.pools import make_pools
from engine.step.attention import AttentionBatch, Specs
from engine.step.hooks import AttentionHook, DecodeRows, HookSite, Narrowed

CPU = torch.device("cpu")
PAGE, PAGES = 16, 24
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "halves": {},
    "odd": {"head_dim": 24},
    "mistral": {"family": "mistral", "sliding_window": 24},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    **FUSED,
    **LATENTS,
    "wrapped-llama": {},
    "wrapped-vaultgemma": PATHS["vaultgemma"],
    "wrapped-phi": WRAPPED["phi"],
}
KERNELS = {
    "_rms_norm": 1, "_rope_store": 2, "_add_rms_norm": 4, "_silu_mul": 2, "_attend_prompt": 2,
}  # fmt: skip
"""Of a prompt through two layers of Llama, Mistral, Qwen2 or Qwen3: what lies between products.
Attention of prompts is one call of a library on a Hopper."""
PLAIN = ("llama", "mistral", "qwen3")
WIDE = {
    "hidden": 512, "heads": 8, "family": "qwen3_moe", "head_dim": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True,
}  # fmt: skip
"""As wide as kernels of one row want it."""
OF_LAYER = {
    "_rope_store": 1, "_attend_part": 1, "_merge_parts": 1, "_add_rms_norm": 1, "_route": 1,
    "_add_up_norm": 1,
}  # fmt: skip
ONE_ROW: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "experts": (OF_LAYER | {"_dot": 3, "_one_row": 2}, {"_rms_norm": 1, "_dot": 1}),
    "experts-fp8": (
        OF_LAYER | {"_dot": 2, "_unrounded_dot": 1, "_one_row": 2},
        {"_norm": 1, "_dot": 1},
    ),
    "experts-mxfp4": (OF_LAYER | {"_dot": 3, "_four_bits_row": 2}, {"_rms_norm": 1, "_dot": 1}),
}
"""Kernels of a layer with experts for one decode row, products as well; and those of the rest."""
LAUNCHERS = (
    "kernels", "kv.rope_store", "kv.short_conv", "kv.prompt_attention", "decode_attention",
    "products.single_row", "products.joins",
    "products.one_row", "products.unrounded_row", "products.rounding", "experts.routing",
    "experts.products", "experts.one_row", "experts.four_bits", "experts.four_bits_row",
    "experts.summing",
)  # fmt: skip


class Launches(Counter[str]):
    """Counts the kernels that the forward pass launches."""

    def watch(self) -> None:
        for name in LAUNCHERS:
            module = importlib.import_module(f"engine.cuda.{name}")
            module.launch = self._counted(module.launch)  # type: ignore[attr-defined]

    def _counted(self, launch):
        def counted(kernel, grid, *arguments, **options):
            self[kernel.fn.__name__] += 1
            launch(kernel, grid, *arguments, **options)

        return counted


class Fused:
    """The forward pass over a pool whose pages are scattered."""

    def __init__(self, loaded: LoadedModel) -> None:
        keepers, specs = loaded.config.keepers, loaded.model.attention_specs
        kept_by = loaded.config.kept_by
        self._library = None if "Glm" in loaded.config.architecture else flash_attn_like
        groups = [
            GroupSpec(name_of(kind), kind, (Plane(layers, 0, ""),), kept_by(layers).kv_heads)
            for kind, layers in split_layers({at: kept.window for at, kept in keepers.items()})
        ]
        keeps = [kept_by(each.layers) for each in groups]
        makers = [
            maker(
                "auto", PAGE, heads=kept.kv_heads, dim=kept.head_dim, values=kept.values,
                dtype=torch.float32,
            )
            for kept in keeps
        ]  # fmt: skip
        self.pools = make_pools(makers, groups, [PAGES] * len(groups), CPU)
        self.pool = self.pools.first
        for pool in self.pools:
            pool.elements.fill_(3e4)
        self.site = HookSite(self.pool, specs, decodes=True)
        members = [
            self.over(pool, tuple(specs[layer] for layer in group.layers))
            for group, pool in zip(groups, self.pools, strict=True)
        ]
        self.attention = members[0]
        self.groups = PagedGroups(members, self.pools.places)
        self.forward = forward_of(loaded.model, self.pools, self.groups, 128)
        self.table = torch.from_numpy(np.random.default_rng(0).permutation(PAGES - 1) + 1)
        self.table = self.table[: 2 * (PAGES // 2 - 1)].view(2, -1)

    def over(self, pool: KvPool, specs: Specs) -> Member:
        if specs and specs[0].taps is not None:
            return ShortConvBackend(pool, specs)
        if specs and specs[0].latents is not None:
            return LatentBackend(pool, specs, prompt_latents, decode_latents, self._library)
        return TritonBackend(pool, specs, prompt_attention, decode_attention)

    def step(
        self,
        rows: list[tuple[int, int, list[int]]],
        *,
        ends: bool = False,
        hooks: StepHooks | None = None,
        counts: list[int] | None = None,
    ) -> Tensor:
        """Rows are (sequence, position of the first token, tokens). Logits of all tokens, or of the
        last ones of the rows. `hooks` are around attention, as on a GPU. Heads of decode rows read
        `counts` pages."""
        lens = [len(tokens) for _, _, tokens in rows]
        positions = torch.cat([torch.arange(at, at + len(ids)) for _, at, ids in rows])
        table = self.table[[sequence for sequence, _, _ in rows]]
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lens))
        pages, offsets = table[row_of, positions // PAGE], positions % PAGE
        contexts = np.array([at + len(ids) for _, at, ids in rows], np.int32)
        decodes = sum(length == 1 for length in lens)
        queries = np.array(lens, np.int32)
        starts = contexts - queries
        batches = []
        for spec in self.pools.specs:
            skipped = np.zeros_like(starts)
            if isinstance(spec.kind, Window):  # What lies before the window does not exist.
                skipped = np.maximum(starts - spec.kind.tokens + 1, 0) // PAGE
            width = int((-(-contexts // PAGE) - skipped).max())
            at = torch.from_numpy(skipped)[:, None] + torch.arange(width)
            own = table.gather(1, at.clamp_max(table.shape[1] - 1).long())
            lens_here = contexts - skipped * np.int32(PAGE)
            batches.append(AttentionBatch(queries, lens_here, decodes, own, pages, offsets))
        for member, batch in zip(self.groups.members, batches, strict=True):
            if isinstance(member, ShortConvBackend):
                member.prepare(paged(batch))
            else:
                member.begin(batch)
        hooked: Attend | None = None
        if hooks is not None:
            heads = self.over(self.pool.by_head(), self.site.specs)
            chosen = ChosenAttention(self.attention, heads, self.site, hooks)
            narrowed = None
            if counts is not None:
                of_rows = torch.from_numpy(contexts[:decodes]), torch.tensor(counts)
                narrowed = DecodeRows(table[:decodes], *of_rows, max(counts) + 1, PAGE)
            hooked = Hooked(hooks, chosen).attend(self.attention, narrowed, differ=True)
        ids = torch.tensor([token for _, _, tokens in rows for token in tokens]).int()
        last = None
        if ends:
            at = torch.tensor(lens).cumsum(0).int() - 1
            ends_of = [
                (torch.from_numpy(own.context_lens), own.page_table.int()) for own in batches
            ]
            last = RowEnds(at, [GroupEnds(*own) for own in ends_of])
        stores = (pages * PAGE + offsets).int()
        return self.forward.logits(
            self.forward.hidden(ids, positions.int(), [stores] * len(self.pools), last, hooked)
        )


def paged(batch: AttentionBatch) -> PagedStep:
    """As a kernel has it."""
    first = batch.num_decodes
    lens = torch.from_numpy(batch.query_lens[first:])
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int() if len(lens) else None
    contexts, table = torch.from_numpy(batch.context_lens), batch.page_table.int().contiguous()
    return PagedStep(first, contexts, table, starts, int(lens.max()) if len(lens) else 0, False)


def check(folder: Path, case: str) -> None:
    """A fresh prompt beside another, a chunk of it beside a decode row, and decode rows alone."""
    path = write_tiny_model(folder / case, tokenizer=False, **CASES[case])
    first, second = (np.random.default_rng(seed).integers(1, 384, 60).tolist() for seed in (1, 2))
    impl = {"model_impl": "transformers"} if case.startswith("wrapped") else {}
    want = [Runner(load(path, **impl)).step([(0, ids)])[0] for ids in (first, second)]
    launches = Launches()
    launches.watch()
    with patch.object(Precision, "on_gpu", True):  # Experts lie in one tensor there.
        loaded = load(path, **impl)
        fused = Fused(halved(loaded) if case == "halves" else loaded)
    same(fused.step([(0, 0, first[:19]), (1, 0, second[:30])]), want[0][:19], want[1][:30])
    if case in (*PLAIN, "halves"):
        assert launches == KERNELS, launches
    same(
        fused.step([(0, 19, first[19:20]), (1, 30, second[30:50])]), want[0][19:20], want[1][30:50]
    )
    rows = [(0, 20, first[20:21]), (1, 50, second[50:51])]
    same(fused.step(rows), want[0][20:21], want[1][50:51])
    rows = [(0, 21, first[21:22]), (1, 51, second[51:60])]
    same(fused.step(rows, ends=True), want[0][21:22], want[1][59:60])
    if case in PLAIN and fused.pool.num_layers:
        check_hooks(fused, first, second, want)


def check_one_row(folder: Path, case: str) -> None:
    """A decode row alone through two layers with experts."""
    options: dict[str, str] = {}
    if case == "experts-mxfp4":
        source = write_tiny_model(folder / "source", tokenizer=False, **EVERY["gpt_oss"])
        path = folder / case
        write_mxfp4(source, path, folder / "floats")
    else:
        path = write_tiny_model(folder / case, tokenizer=False, **WIDE)
        options = {"quantization": "fp8"} if case == "experts-fp8" else {}
    want = Runner(load(path, **options)).step([(0, [7])])[0]
    launches = Launches()
    launches.watch()
    capability = patch.object(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    with patch.object(Precision, "on_gpu", True), capability:
        fused = Fused(load(path, **options))
    got = fused.step([(0, 0, [7])])
    error = (got - want).norm() / want.norm()
    assert error < (1e-2 if options else 1e-4), float(error)
    layer, rest = ONE_ROW[case]
    assert launches == Counter(layer) + Counter(layer) + Counter(rest), launches


class Reversing(AttentionHook):
    """Reads all pages of its rows, in another order, if it chooses."""

    def __init__(self, kv_heads: int, *, chooses: bool) -> None:
        self._kv_heads = kv_heads
        self.name, self.chooses_pages = "one", chooses
        self.heard: list[tuple[int, int]] = []
        self.narrowed: list[int] = []

    def rows_narrowed(self, step):
        rows = np.flatnonzero(step.tags[: step.num_decodes])
        return Narrowed(rows, -(-step.context_lens[rows] // PAGE))

    def choosing_began(self, rows):
        self._rows = rows

    def pages_wanted(self, layer, q):
        self.narrowed.append(layer)
        assert len(q) == len(self._rows.counts)
        lasts = self._rows.counts[:, None] - 1
        places = lasts - 1 - torch.arange(self._rows.most)
        places[places < 0] = 1 << 40  # They are the last page, or read by nobody.
        places.scatter_(1, lasts.clamp_min(0), lasts.clamp_min(0))
        return places[:, None].repeat(1, self._kv_heads, 1)

    def attention_ended(self, layer, q, out):
        self.heard.append((layer, len(out)))


def check_hooks(fused: Fused, first: list[int], second: list[int], want: list[Tensor]) -> None:
    """Attention with hooks around it: every layer has all tokens, and heads read what is chosen.
    One decode row of two is narrowed, or one beside a piece of a prompt, or none."""
    alone = [(0, 21, first[21:22]), (1, 51, second[51:52])]
    beside = [(0, 21, first[21:22]), (1, 51, second[51:60])]
    nothing = np.zeros(0, np.int32)
    layers = fused.pool.num_layers
    for rows, counts in ((alone, [0, 4]), (beside, [2]), (beside, None)):
        queries = np.array([len(tokens) for _, _, tokens in rows])
        starts, decodes = np.array([21, 51]), len(counts or [0])
        plan = SimpleNamespace(
            number=0, hook_tags=np.array([[*(counts or [1]), 1][:2]]), query_lens=queries,
            num_decodes=decodes, context_lens=starts + queries, page_table=fused.table.numpy(),
            arrived=nothing,
        )  # fmt: skip
        hook = Reversing(fused.pool.num_kv_heads, chooses=counts is not None)
        hooks = StepHooks([hook], fused.site, 60.0)
        narrowed = hooks.narrow(plan)
        assert (narrowed is None) == (counts is None)
        hooks.begin(plan)
        got = fused.step(rows, ends=True, hooks=hooks, counts=counts)
        last = (starts + queries)[1]
        same(got, want[0][21:22], want[1][last - 1 : last])
        assert hooks.end_queued()() == ()
        assert hook.heard == [(layer, queries.sum()) for layer in range(layers)]
        assert hook.narrowed == [
            layer for layer in range(layers) if counts and fused.site.may_choose(layer)
        ]


def same(got: Tensor, *want: Tensor) -> None:
    torch.testing.assert_close(got, torch.cat(want), atol=1e-4, rtol=1e-4)


def check_attention(*, every: bool) -> None:
    """Windows, caps and sinks, in one mix of rows or in every, against float64."""

    def backend_over(_name: str, pool: PlainPool, specs: Specs) -> TritonBackend:
        return TritonBackend(pool, specs, prompt_attention, decode_attention)

    with patch("test_attention.backend_over", backend_over):
        few = [MIXES["both"], SEVERAL["eight"]]
        for rows, decodes in (MIXES | SEVERAL).values() if every else few:
            check_rows(rows, 8, FEATURES, decodes, 7, "triton")
        if not every:
            return
        rows = [Row(1, 300), Row(1, 170), Row(140, 140), Row(20, 230)]
        check_rows(rows, 16, FEATURES, 2, 8, "triton")


def main() -> None:
    interpreter._convert_float = convert_as_a_gpu_does
    interpreted_ptx.teach()
    for case in sys.argv[2:]:
        with torch.inference_mode():
            if case in ("attention", "mixes"):
                check_attention(every=case == "mixes")
            elif case in ONE_ROW:
                check_one_row(Path(sys.argv[1]), case)
            else:
                check(Path(sys.argv[1]), case)
        print(case, "equal", flush=True)


if __name__ == "__main__":
    main()
