"""Adapters that cannot be had are refused with field and value; and whatever order of commands and
requests: no slot that is used gets another content, and nothing is held for ever."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from adapters_kit import adapter, write_adapter
from engine_kit import build, check_baseline, finish, running, submit
from hypothesis import given, settings
from hypothesis import strategies as st
from paths_kit import prompt_of
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.adapters.registry import Adapters
from engine.adapters.slots import AdapterSlots
from engine.adapters.types import Adapter, AdapterError
from engine.adapters.waits import FRESH_S, SlotWaits
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model import load_model
from engine.model.adapters.reading import Limits, read_adapter
from engine.model.adapters.sites import linears_of, shapes_of
from engine.parts.paging import EngineError
from engine.types import FailureReason, SamplingParams

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
FIELDS = [
    ({"peft_type": "IA3"}, 'peft_type "IA3"'),
    ({"use_dora": True}, "use_dora true"),
    ({"bias": "all"}, 'bias "all"'),
    ({"lora_bias": True}, "lora_bias true"),
    ({"modules_to_save": ["lm_head"]}, 'modules_to_save ["lm_head"]'),
    ({"trainable_token_indices": [1]}, "trainable_token_indices [1]"),
    ({"layer_replication": [[0, 2]]}, "layer_replication [[0, 2]]"),
    ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens [1, 2]"),
    ({"arrow_config": {"top_k": 3}}, "arrow_config"),
    ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow 1"),
    *(({"init_lora_weights": name}, f'"{name}"') for name in ("pissa", "olora", "loftq", "corda")),
    ({"r": 0}, "r 0"),
    ({"r": 65}, "r 65 is above the 64 of this worker"),
    ({"lora_alpha": float("inf")}, "lora_alpha Infinity"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern -1"),
    ({"rank_pattern": {"q_proj": 4}}, "has shape [8, 64], the model and rank say [4, 64]"),
    ({"rank_pattern": {"(": 4}}, "no regular expression"),
    ({"rank_pattern": {"a" * 1001: 4}}, "more than 1000 characters"),
    ({"target_modules": []}, "target_modules []"),
    ({"target_modules": ["q_proj"]}, "do not name model.layers.0.mlp.down_proj"),
    ({"layers_to_transform": ["a"]}, 'layers_to_transform ["a"]'),
    ({"layers_to_transform": [0]}, "do not name model.layers.1"),
]
"""Changes of a config, and what is told."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.fixture(scope="module")
def shapes(path):
    loaded = load_model(str(path), dtype=torch.float32, device=torch.device("cpu"))
    return shapes_of(linears_of(loaded.model))


@pytest.fixture(scope="module")
def whole(path, tmp_path_factory):
    return write_adapter(path, tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def folder(whole, tmp_path):
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


LIMITS = Limits(64, 1 << 24)


def refused(folder: Path, shapes, limits: Limits = LIMITS) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, shapes, limits, torch.float32)
    return str(caught.value)


@pytest.mark.parametrize(("change", "told"), FIELDS)
def test_fields(change, told, folder, shapes):
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text()) | change
    file.write_text(json.dumps(config))
    if change.get("r") == 65:
        resize(folder, 65)
    assert told in refused(folder, shapes)


def resize(folder: Path, rank: int) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = {
        name: torch.ones(rank, each.shape[1]) if "lora_A" in name else torch.ones(len(each), rank)
        for name, each in load_file(file).items()
    }
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        (Q.format("B"), None, "has no lora_B"),
        (Q.format("A"), torch.ones(8, 32), "has shape [8, 32], the model and rank say [8, 64]"),
        (Q.format("A"), torch.full((8, 64), torch.nan), "are not finite"),
        (Q.format("A"), torch.ones(8, 64, dtype=torch.int32), "is int32"),
        ("base_model.model.lm_head.lora_A.weight", torch.ones(8, 64), "lm_head can have no pair"),
        (Q.format("A").replace("layers.0", "layers.7"), torch.ones(8, 64), "layers.7"),
        (Q.format("A").replace("model.layers", "vision.layers"), torch.ones(8, 64), "no pair"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(8, 64), "neither"),
        (
            Q.format("A").replace("model.layers", "language_model.model.layers"),
            torch.ones(8, 64),
            "is a second lora_A of model.layers.0.self_attn.q_proj",
        ),
        (Q.format("magnitude_vector"), torch.ones(64), "neither lora_A nor lora_B"),
    ],
)
def test_tensors(name, tensor, told, folder, shapes):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), file)
    assert told in refused(folder, shapes)


def test_files(folder, shapes):
    assert "has more than the 0 MiB" in refused(folder, shapes, Limits(64, 1000))
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert "is damaged" in refused(folder, shapes)
    file.rename(folder / "adapter_model.bin")
    assert "but adapter_model.bin: only safetensors are read" in refused(folder, shapes)
    (folder / "adapter_config.json").write_text("[")
    assert "no adapter_config.json that can be read" in refused(folder, shapes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"adapters": ("x",), "max_adapters": 1}, "'x' is not name=folder"),
        ({"adapters": ("x=/nowhere",), "max_adapters": 1}, "adapter 'x': /nowhere has no"),
        ({"adapters": ("x=y",)}, "max_adapters above 0"),
        ({"adapters": ("x\n=y",), "max_adapters": 1}, "no control characters"),
        (
            {"adapters": ("x=GOOD", "x=GOOD/."), "max_adapters": 1, "max_adapter_rank": 7},
            "adapter 'x': adapter_config.json: r 8 is above the 7",
        ),
        ({"adapters": ("x=GOOD", "x=GOOD2"), "max_adapters": 1}, "'x' names two folders"),
    ],
)
def test_options(options, told, path, folder, monkeypatch):
    """All of these are seen before weights are read."""
    (folder.parent / f"{folder.name}2").symlink_to(folder)
    monkeypatch.setattr("engine.engine.load", None)
    stated = [one.replace("GOOD", str(folder)) for one in options["adapters"]]
    options = {**options, "adapters": tuple(stated)}
    with pytest.raises(EngineError, match=told):
        Engine.build(EngineConfig(model=str(path), num_pages=20, **options))


@pytest.mark.parametrize("name", ["", "a" * 129, "a\nb"])
def test_names(name):
    adapters = Adapters(lambda *_: adapter(1), 1 << 20)
    with pytest.raises(AdapterError, match="an adapter's name has 1 to 128 bytes"):
        adapters.load(name, Path())


# -- any order ----------------------------------------------------------------------------------


def test_the_adapter_that_is_used_stays():
    """A slot whose adapter was used last, and is not now, is the one that another gets."""
    slots, own = AdapterSlots(2), [adapter(number) for number in range(3)]
    first, second = slots.take(own[0]), slots.take(own[1])
    assert not slots.has_room(own[2])
    slots.give_back(own[1])
    assert slots.has_room(own[2])
    assert slots.take(own[2]) == second
    assert slots.take(own[0]) == first
    assert slots.resident == {own[0].digest, own[2].digest}


def test_what_is_told_of_slots():
    slots, own = AdapterSlots(2), [adapter(number) for number in range(3)]
    assert (slots.load().resident, slots.load().idle_slots) == ((), 2)
    for each in (0, 1, 1):
        slots.take(own[each])
    slots.give_back(own[0])
    told = slots.load()
    assert (told.resident, told.slots) == ((own[1].digest, own[0].digest), 2), "those in use first"
    assert (told.idle_slots, told.loads, told.evictions) == (1, 2, 0)
    slots.take(own[2])
    told = slots.load()
    assert (set(told.resident), told.idle_slots) == ({own[1].digest, own[2].digest}, 0)
    assert (told.loads, told.evictions) == (3, 1)


def test_how_long_a_slot_is_waited_for():
    now = [100.0]
    waits = SlotWaits(lambda: now[0])
    assert waits.recent_s() == 0.0
    for began_s, ended_s in ((100.0, 104.0), (104.0, 112.0)):
        now[0] = ended_s
        waits.ended(began_s)
    assert (waits.count, waits.seconds, waits.recent_s()) == (2, 12.0, 5.0)
    now[0] += FRESH_S + 1
    assert waits.recent_s() == 0.0
    waits.ended(now[0] - 2)
    assert waits.recent_s() == 2.0, "an old average counts no more"


def test_a_request_that_waits_for_a_slot_is_counted(path):
    """The adapter has a slot to itself while its request runs; the one behind it waits."""
    with running(path, max_adapters=1) as engine:
        digests = [engine.adapters.add(name, adapter(i)).digest for i, name in enumerate("ab")]
        runs = [submit(engine, [5], 8, adapter=each, ignore_eos=True) for each in digests]
        finish(*runs)
        wait_until(lambda: engine.load().adapters.idle_slots == 1)
        told = engine.load()
        assert told.adapters.waits == 1
        assert (told.adapters.loads, told.adapters.evictions) == (2, 1)
        assert 0 < told.adapters.waited_s < 60
        assert told.adapters.recent_wait_s == told.adapters.waited_s


ROOM = 3


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_books_agree_in_any_order(data):
    """Names, contents, waits for room in host memory, and slots, beside the same written out with
    sets. There is room for three contents; each is what its folder's name says."""
    count = data.draw(st.integers(1, 3), "slots")
    adapters = Adapters(lambda path, _: adapter(int(path.name)), ROOM * adapter(0).num_bytes)
    slots, named = AdapterSlots(count), {}
    waiting: list[tuple[bytes, Future[Adapter]]] = []
    running: list[tuple[Adapter, int, Future[Adapter]]] = []

    def settle() -> None:
        """Reads end, or lack room, since requests hold as many contents as there may be."""

        def is_settled() -> bool:
            with adapters._changed:
                first = next(iter(adapters._waits.values()), None)
                full = adapters._lacks_room and len(adapters._users) == ROOM
                return first is None or (full and first.requests > 0)

        wait_until(is_settled, poll_s=1e-4)

    def have() -> set[bytes]:
        done = {digest for digest, held in waiting if held.done()}
        return done | {own.digest for own, _, _ in running}

    for _ in range(40):
        match data.draw(st.sampled_from(["load", "unload", "begin", "begin", "admit", "end"])):
            case "load":
                name, number = data.draw(st.sampled_from("abc")), data.draw(st.integers(0, 5))
                adapters.load(name, Path(str(number)), again=True)
                named[name] = number
            case "unload":
                name = data.draw(st.sampled_from("abc"))
                assert adapters.unload(name) == (named.pop(name, None) is not None)
            case "begin" if named:
                digest = bytes([data.draw(st.sampled_from(sorted(named.values())))]) * 32
                held = adapters.hold(digest)
                assert held is not None
                waiting.append((digest, held))
            case "admit":
                for each in [each for each in waiting if each[1].done()]:
                    own = each[1].result()
                    assert own.digest == each[0]
                    if slots.has_room(own):
                        waiting.remove(each)
                        running.append((own, slots.take(own), each[1]))
                    else:
                        assert slots.used == count
            case "end" if running or waiting:
                at = data.draw(st.integers(0, len(running) + len(waiting) - 1))
                if at < len(running):
                    own, _, held = running.pop(at)
                    slots.give_back(own)
                    adapters.release(own.digest, held)
                else:
                    adapters.release(*waiting.pop(at - len(running)))
        settle()
        by_slot: dict[int, bytes] = {}
        for own, slot, _ in running:
            assert by_slot.setdefault(slot, own.digest) == own.digest, "another content"
        assert len(by_slot) == len({own.digest for own, _, _ in running}) == slots.used
        assert adapters.held == len(running) + len(waiting)
        assert {info.name: info.digest[0] for info in adapters.named()} == named
        assert len(adapters._contents) <= ROOM
        assert have() <= adapters._contents.keys()
        if not all(held.done() for _, held in waiting):
            assert len(have()) == ROOM, "what waits has no room"
    for own, _, held in running:
        adapters.release(own.digest, held)
    while waiting:  # All get theirs in turn.
        settle()
        done = [each for each in waiting if each[1].done()]
        assert done
        for each in done:
            adapters.release(*each)
            waiting.remove(each)
    for name in list(named):
        adapters.unload(name)
    assert not adapters._contents
    assert not adapters.has(adapter(0).digest)


def test_what_a_folder_has_no_more(path, tmp_path):
    """Requests for it fail, and its name is gone, as soon as it would have to be read again."""
    one, other = (write_adapter(path, tmp_path / str(i), i) for i in range(2))
    size = sum(each.numel() * 4 for each in load_file(one / "adapter_model.safetensors").values())
    engine = build(path, max_adapters=1, adapters_host_bytes=int(1.5 * size))
    told: list[bool] = []
    engine.adapters.on_gone = lambda: told.append(True)
    try:
        first = engine.adapters.load("one", one).digest
        want = submit(engine, prompt_of(20), 6, adapter=first, ignore_eos=True)
        finish(want)
        assert engine.adapters.in_host is None
        second = engine.adapters.load("other", other).digest
        assert engine.adapters.in_host == (second,)
        runs = [
            submit(engine, prompt_of(20), 6, adapter=digest, ignore_eos=True)
            for digest in (first, second, first)
        ]
        finish(*runs)
        assert runs[0].tokens == runs[2].tokens == want.tokens != runs[1].tokens
        submitted = submit(engine, prompt_of(20), 6, adapter=second, ignore_eos=True)
        finish(submitted)
        for file in other.iterdir():
            (one / file.name).write_bytes(file.read_bytes())
        gone = submit(engine, prompt_of(20), 6, adapter=first)
        assert gone.done.wait(30)
        assert gone.failed is not None
        assert gone.failed.reason is FailureReason.ADAPTER
        assert [info.name for info in engine.adapters.named()] == ["other"]
        assert told
        check_baseline(engine)
        assert engine.adapters.held == 0
    finally:
        engine.stop()


def test_nobody_passes_who_waits_for_room():
    """While the first that waits has no room, others wait behind it, those in memory, too."""
    adapters = Adapters(lambda path, _: adapter(int(path.name)), 2 * adapter(0).num_bytes)
    digests = [adapters.load(str(i), Path(str(i))).digest for i in range(3)]
    held = [adapters.hold(digest) for digest in digests[1:]]
    lacks = adapters.hold(digests[0])
    wait_until(lambda: adapters._lacks_room)
    behind = adapters.hold(digests[1])
    assert not lacks.done()
    assert not behind.done()
    adapters.release(digests[2], held[1])
    assert lacks.result(10).digest == digests[0]
    assert behind.result(10).digest == digests[1]
    cancelled = adapters.hold(digests[2])
    wait_until(lambda: adapters._lacks_room)
    adapters.release(digests[2], cancelled)
    wait_until(lambda: not adapters._waits)
    assert not cancelled.done()
    for digest, each in ((digests[1], held[0]), (digests[0], lacks), (digests[1], behind)):
        adapters.release(digest, each)
    assert adapters.held == 0


def test_a_request_that_cannot_be_submitted_holds_no_adapter(path):
    with running(path, max_adapters=1) as engine:
        digest = engine.adapters.add("a", adapter(1)).digest
    with pytest.raises(RuntimeError, match="after shutdown"):  # Of the matchers' thread.
        submit(engine, [5], adapter=digest, sampling=SamplingParams(allowed_token_ids=(5,)))
    assert engine.adapters.held == 0


def test_an_engine_under_random_commands(path, tmp_path):
    """Every request ends, with the content with which it began, and nothing is left."""
    folders = [write_adapter(path, tmp_path / str(i), i, r=2 + i) for i in range(4)]
    size = max(sum(file.stat().st_size for file in folder.iterdir()) for folder in folders)
    room = {"adapters_host_bytes": 2 * size}
    engine = build(path, max_adapters=2, num_pages=40, max_sequences=4, **room)
    draw = random.Random(3)
    answers: dict[tuple[bytes, int], list[list[int]]] = {}
    try:
        runs, finished = [], 0
        for turn in range(60):
            name = draw.choice("ab")
            if draw.random() < 0.3:
                engine.adapters.load(name, draw.choice(folders), again=True)
            elif draw.random() < 0.1:
                engine.adapters.unload(name)
            known = [info.digest for info in engine.adapters.named()] + [b""]
            digest, length = draw.choice(known), draw.choice([20, 33])
            run = submit(engine, prompt_of(length), 6, adapter=digest, ignore_eos=True)
            if draw.random() < 0.15:
                engine.cancel(run.request.id)
            else:
                runs.append((digest, length, run))
            if turn % 12 == 11:
                finish(*(run for _, _, run in runs[finished:]))
                finished = len(runs)
        finish(*(run for _, _, run in runs[finished:]))
        for digest, length, run in runs:
            assert run.failed is None
            assert answers.setdefault((digest, length), run.tokens) == run.tokens
        assert len({digest for digest, _ in answers}) > 2
        check_baseline(engine)
        assert engine.adapters.held == 0
    finally:
        engine.stop()
