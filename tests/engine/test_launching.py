"""Launches past Triton, on a device that is not there: each is what Triton's own would be."""

from __future__ import annotations

import random
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402

from engine.cuda.kernels import launch  # noqa: E402
from engine.cuda.steps import launching  # noqa: E402

MEMORY = torch.zeros(64, dtype=torch.uint8)
FLOATS, HALVES = MEMORY.view(torch.float32), MEMORY.view(torch.float16)
TENSORS = [FLOATS, HALVES, FLOATS[1:], HALVES[1:], FLOATS[4:], torch.nn.Parameter(FLOATS), None]
NUMBERS = [0, 1, 2, 15, 16, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63]
NUMBERS += [True, False, 0.0, 1.0, 16.0, 0.5, None]  # type: ignore[list-item]
CONSTANTS = [0, 1, 16, 2.5, None, "a"]
OPTIONS: list[dict[str, Any]] = [
    {}, {"num_warps": 2}, {"num_warps": 8}, {"num_warps": 2, "launch_pdl": True},
]  # fmt: skip


class Hopper:
    """Triton's driver of a device that compiles nothing, and writes launches down."""

    device, stream = 0, 5

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: dict[str, int] = {}
        """Handles, by all that Triton compiles for."""
        self._handles = count(1)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        assert device == self.device
        return self.stream

    def compile(self, source: Any, target: Any, options: Any, **_: Any) -> CompiledKernel:
        done = CompiledKernel.__new__(CompiledKernel)
        kept = source.signature, source.constants, source.attrs, options
        done.module, done.src = object(), source
        done.function = self.compiled.setdefault(f"{self.device} {kept}", next(self._handles))
        done.packed_metadata = options["num_warps"], options["launch_pdl"]
        done.name, done._run = "", lambda *given: self.launched.append(given)
        return done


@triton.jit(do_not_specialize=["rows"])
def _takes(x, y, rows, size, eps, known: tl.constexpr, block: tl.constexpr):
    pass


@pytest.fixture
def device():
    hopper, before = Hopper(), driver._active
    driver.set_active(hopper)
    _takes.device_caches.clear()
    launching._known.clear()
    _takes.device_caches[0]  # It sets the compiler.
    with patch.object(_takes, "compile", hopper.compile):
        yield hopper
    driver._active = before
    _takes.device_caches.clear()
    launching._known.clear()


def drawn(rng: random.Random) -> tuple[Any, ...]:
    tensors, numbers = (rng.choice(TENSORS) for _ in range(2)), rng.choice(NUMBERS)
    return *tensors, numbers, rng.choice(NUMBERS), rng.choice(NUMBERS), *rng.choices(CONSTANTS, k=2)


def launched(hopper: Hopper, call: Any) -> tuple[Any, ...]:
    """What the launcher is given, without the hooks and what they would be told."""
    call()
    *before, _told, _enter, _leave = hopper.launched[-1][:9]
    return *before, *map(id, hopper.launched.pop()[9:])


def test_each_is_what_tritons_own_would_be(device):
    """Of 4,000 drawn ones most are told by one look. Dtypes, addresses, numbers, kinds of numbers,
    constants and options differ, each alone as well."""
    rng, past = random.Random(0), 0
    given, options = drawn(rng), OPTIONS[0]
    run, asked = type(_takes).run, []

    def noted(*arguments: Any, **named: Any) -> Any:
        asked.append(arguments)
        return run(*arguments, **named)

    for number in range(4000):
        if number % 50 == 0:
            given = drawn(rng)
        place = rng.randrange(len(given) + 1)
        if place == len(given):
            options = rng.choice(OPTIONS)
        else:
            given = *given[:place], drawn(rng)[place], *given[place + 1 :]
        grid = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
        own = launched(device, lambda: _takes[grid](*given, **options))
        with patch.object(type(_takes), "run", noted):
            asked.clear()
            for _ in range(2):
                ours = launched(device, lambda: launch(_takes, grid, *given, **options))
                assert ours == own, (given, options)
        assert len(asked) <= 1, "the second time it is known"
        past += not asked
    assert past > 500
    assert len(device.compiled) > 500


def test_another_device_and_stream(device):
    given = FLOATS, HALVES, 3, 4, 0.5, 1, 2
    for device.device, device.stream in ((0, 5), (1, 6), (0, 7), (1, 8)):
        _takes.device_caches[device.device]
        _takes.compile = device.compile
        own = launched(device, lambda: _takes[(2,)](*given))
        for _ in range(2):
            assert launched(device, lambda: launch(_takes, (2,), *given)) == own


def test_who_listens_to_launches_hears_each(device):
    """Once it has gone, launches pass Triton again."""
    given, heard = (FLOATS, HALVES, 3, 4, 0.5, 1, 2), []
    for _ in range(2):
        launch(_takes, (2,), *given)
    before = SimpleNamespace(calls=[lambda _told: None])
    with patch.object(_takes, "pre_run_hooks", [lambda *_given, **_: heard.append("run")]):
        launch(_takes, (2,), *given)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with patch.object(knobs.runtime, name, before):
            launch(_takes, (2,), *given)
            *_, told, enter, leave = device.launched[-1][:9]
            assert before in (enter, leave)
            assert told is not None
    launch(_takes, (2,), *given)
    assert heard == ["run"]
    assert device.launched[-1][6:9] == (None, None, None)


def test_what_is_no_plain_value_is_tritons(device):
    """A tensor of another class, a list, arguments by name: nothing of it is kept."""

    class Wrapped:
        dtype = torch.float32

        def data_ptr(self) -> int:
            return 16

    plain = FLOATS, HALVES, 3, 4, 0.5, 1
    for given, named in (
        ((Wrapped(), *plain[1:], 2), {}), ((*plain, (1, 2)), {}), ((*plain, [1]), {}),
        ((*plain, tl.float32), {}), (plain, {"block": 2}),
    ):  # fmt: skip
        with patch.object(_takes, "run", wraps=_takes.run) as run:
            for _ in range(2):
                try:
                    launch(_takes, (2,), *given, **named)
                except TypeError:  # Triton's own takes no list.
                    assert isinstance(given[-1], list)
        assert run.call_count == 2, given


def test_memory_is_bounded(device):
    """Where a number is another one in each step."""
    for size in range(2 * launching._MOST_KEYS):
        launch(_takes, (2,), FLOATS, HALVES, size, size + 2, 0.5, 1, 2)
    for rows in range(2 * launching._MOST_KEYS):
        launch(_takes, (2,), FLOATS, HALVES, rows, 2, 0.5, 1, 2)
    (known,) = launching._known.values()
    assert len(known.ready) <= launching._MOST_KEYS
    assert len(device.compiled) < 9
