"""Several ranks whose memory is on one device, and what their sums must be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPS = 1e-5


class Ranks:
    """Each phase of a call is a launch for each rank, so no program waits for another."""

    def __init__(
        self, count: int, device: torch.device, programs: int = 4, half_bytes: int = 1 << 20
    ) -> None:
        from engine.cuda.ranks.shared import pad_bytes, shared_at

        pad = pad_bytes(programs, count)
        self.memory = [
            torch.zeros(pad + 2 * half_bytes, dtype=torch.uint8, device=device)
            for _ in range(count)
        ]
        for own in self.memory:
            own[pad:] = 0xFF  # Not a number, of any type.
        bases = [own.data_ptr() for own in self.memory]
        self.word = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        """Of all ranks; not 0: no program waits."""
        view = bases, programs, half_bytes, device, self.word
        self.all = [shared_at(rank, *view) for rank in range(count)]

    def all_reduce(self, parts: Sequence[Tensor], shots: int) -> None:
        for phase in range(shots + 1):
            for own, x in zip(self.all, parts, strict=True):
                own._sum(x, x, x, 0.0, shots, adds=False, phases=(phase, phase))

    def add_rms_norm(
        self, residuals: Sequence[Tensor], parts: Sequence[Tensor], weight: Tensor, shots: int
    ) -> None:
        for phase in range(shots + 1):
            for own, residual, x in zip(self.all, residuals, parts, strict=True):
                own._sum(x, residual, weight, EPS, shots, adds=True, phases=(phase, phase))

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        outs = [x.new_empty(len(parts), *x.shape) for x in parts]
        for phase in range(2):
            for own, x, out in zip(self.all, parts, outs, strict=True):
                own._gather(x, out, x.numel(), (phase, phase))
        return outs


def parts_of(
    count: int, rows: int, size: int, dtype: torch.dtype, device: torch.device, seed: int
) -> list[Tensor]:
    """What each rank adds: of very different sizes, so that an order of sums would show."""
    drawn = torch.Generator(device).manual_seed(seed)
    scales = [10.0 ** (rank % 3) for rank in range(count)]
    shape = (rows, size)
    return [
        (torch.randn(shape, generator=drawn, device=device) * scale).to(dtype) for scale in scales
    ]


def check_sums(
    ranks: Ranks, rows: int, size: int, dtype: torch.dtype, shots: int, seed: int = 0
) -> None:
    """A sum, and a sum with residual and norm, against float64. All ranks have the same bits."""
    from engine.cuda.kernels import add_rms_norm

    device = ranks.memory[0].device
    parts = parts_of(len(ranks.all), rows, size, dtype, device, seed)
    total = torch.stack([part.double() for part in parts]).sum(0)
    sums = [part.clone() for part in parts]
    ranks.all_reduce(sums, shots)
    for own in sums:
        assert torch.equal(own, sums[0])
    step = torch.finfo(dtype).eps
    largest = torch.stack([part.double().abs() for part in parts]).sum(0)
    rounding = step / 2 if device.type == "cuda" else step  # The interpreter cuts off.
    bound = rounding * total.abs() + 1e-6 * largest + 1e-7
    assert ((sums[0].double() - total).abs() <= 1.01 * bound).all()

    residual = parts_of(1, rows, size, dtype, device, seed + 1)[0]
    weight = parts_of(1, 1, size, dtype, device, seed + 2)[0][0]
    residuals = [residual.clone() for _ in parts]
    ranks.add_rms_norm(residuals, parts, weight, shots)
    want = add_rms_norm(residual, sums[0].clone(), weight, EPS)
    for own, x in zip(residuals, parts, strict=True):
        assert torch.equal(own, residual)
        assert torch.equal(x, parts[0])
    torch.testing.assert_close(parts[0], want, rtol=4 * step, atol=1e-6)


def check_halves_take_turns(device: torch.device) -> None:
    """So a rank that is ahead writes nothing that another one still reads."""
    ranks = Ranks(2, device, half_bytes=1 << 10)
    halves = [own[-2 << 10 :].view(2, -1) for own in ranks.memory]
    written: list[list[bool]] = []
    for shots in (1, 2, 1, 2):
        for half in halves:
            half.fill_(0xFF)
        ranks.all_reduce(parts_of(2, 3, 8, torch.float32, device, shots), shots)
        written += [[bool((one != 0xFF).any()) for one in half] for half in halves]
    first, second = [[True, False]] * 2, [[False, True]] * 2
    assert written == [*first, *second, *first, *second]


def check_waits(ranks: Ranks) -> None:
    """Each rank can read what any has waited. Calls leave it as it is where no program waits."""
    from engine.cuda.ranks.shared import SIGNAL_BYTES

    place = len(ranks.all[0].calls) * len(ranks.all) * SIGNAL_BYTES
    told = [own[place : place + SIGNAL_BYTES].view(torch.int64) for own in ranks.memory]
    for rank, waited_ns in enumerate(told):
        waited_ns.fill_((7 << 40) + rank)
    check_gather(ranks, 3, 3)
    check_sums(ranks, 5, 40, torch.float32, 2)
    want = [(7 << 40) + rank for rank in range(len(ranks.all))]
    for own in ranks.all:
        assert own.waits().tolist() == want


def check_gather(ranks: Ranks, rows: int, columns: int) -> None:
    device = ranks.memory[0].device
    parts = parts_of(len(ranks.all), rows, columns, torch.float32, device, rows)
    for out in ranks.gather(parts):
        assert torch.equal(out, torch.stack(parts))


def check_best(count: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """The best token of rows whose parts are divided, with ties, and with what is no number."""
    from engine.cuda.kernels import greedy
    from engine.cuda.ranks.best import best_of_part, best_of_ranks

    drawn = torch.Generator(device).manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=drawn, device=device).to(dtype)
    each = -(-vocab // count)
    logits[1, each] = logits[1, each + 3] = logits[1, each + 4] = 99
    logits[2, each - 1] = logits[2, each] = 99
    logits[3, 5] = float("nan")
    logits[4, vocab - 1] = float("inf")
    logits[5] = -7
    slots = torch.tensor([4, 2, 0, 1, 3, 6], dtype=torch.int32, device=device)
    tables = [torch.full((8,), -1, dtype=torch.int32, device=device) for _ in "ab"]
    want = greedy(logits, slots, tables[0])
    parts = [part.contiguous() for part in logits.split(each, 1)]
    told = [best_of_part(part, rank * each) for rank, part in enumerate(parts)]
    got = best_of_ranks(torch.stack(told), slots, tables[1])
    assert torch.equal(got, want)
    assert torch.equal(*tables)
    assert torch.equal(best_of_ranks(torch.stack(told)), want)
    assert want[0, [1, 2, 5]].tolist() == [each, each - 1, 0]
    assert want[1].tolist() == [1, 1, 1, 0, 0, 1]
