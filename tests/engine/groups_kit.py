"""Workers of an expert group whose memory is on one device, and what their experts must give."""

from __future__ import annotations

import torch
from ranks_kit import Ranks
from torch import Tensor

from engine.model.experts.config import Held
from engine.model.experts.routing import Chosen, held

NOBODY, EXPERTS = 9999, 12


def gathered(
    ranks: Ranks, each: list[tuple[Tensor, Chosen, Tensor | None]], rows: int
) -> list[tuple[Tensor, Chosen]]:
    """Of each worker. Each phase is a launch for each."""
    from engine.cuda.groups.moving import Rows, gather

    count = EXPERTS // len(ranks.all)
    for phase in range(2):
        found = [
            gather(own, x, chosen, Rows(rows, slots, NOBODY), count, (phase, phase))
            for own, (x, chosen, slots) in zip(ranks.all, each, strict=True)
        ]
    return found


def check_moving(
    ranks: Ranks, tokens: list[int], rows: int, size: int, dtype: torch.dtype, *, pads: bool
) -> None:
    """Rows of workers with different numbers of tokens, some of which are padding; then the sums of
    each token's experts, wherever they are, with a shared expert and its gate, or without."""
    from engine.cuda.experts.routing import sort
    from engine.cuda.experts.summing import Parts, Shared
    from engine.cuda.groups.moving import fits, scatter

    device, chosen, count = ranks.memory[0].device, 3, len(ranks.all)
    drawn = torch.Generator(device).manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn, device=device)

    each = []
    for own in tokens:
        scores = random(own, EXPERTS).topk(chosen)
        slots = None
        if pads:
            slots = torch.arange(own, dtype=torch.int32, device=device)
            slots[own // 2 :] = NOBODY
        each.append((random(own, size).to(dtype), Chosen(scores[0], scores[1].int()), slots))
    assert fits(ranks.all[0], each[0][0], rows, chosen)
    found = gathered(ranks, each, rows)
    real = [own // 2 if pads else own for own in tokens]
    for rank, (x, here) in enumerate(found):
        for other, (theirs, choice, _) in enumerate(each):
            first, last = other * rows, other * rows + real[other]
            assert torch.equal(x[first:last], theirs[: real[other]])
            want = held(choice, EXPERTS // count, Held(rank, count))
            assert torch.equal(here.experts[first:last], want.experts[: real[other]])
            assert torch.equal(here.weights[first:last], want.weights[: real[other]])
            behind = slice(last, first + rows)
            assert (here.experts[behind] == EXPERTS // count).all()
            assert (here.weights[behind] == 0).all()
    values = random(EXPERTS, size).to(dtype)  # What each expert gives, whatever it reads.
    parts = []
    for rank, (_, here) in enumerate(found):
        order = sort(here.experts, EXPERTS // count, count)
        given = torch.full((here.experts.numel(), size), float("nan"), dtype=dtype, device=device)
        mine = here.experts < EXPERTS // count
        given[order.places.view_as(mine)[mine].long()] = values[
            (here.experts[mine] * count + rank).long()
        ]
        shared = None
        if (rank + rows) % 3:
            x = each[rank][0]
            gate = random(1, size).to(dtype) if rank % 2 else None
            shared = Shared(random(len(x), size).to(dtype), x, gate)
        parts.append(Parts(given, order, here.weights, shared))
    for phase in range(2):
        sums = [
            scatter(own, part, mine, rows, (phase, phase))
            for own, part, mine in zip(ranks.all, parts, tokens, strict=True)
        ]
    step = torch.finfo(dtype).eps
    for rank, (x, choice, _) in enumerate(each):
        want = (values[choice.experts.long()].double() * choice.weights[..., None]).sum(1)
        want[real[rank] :] = 0
        if (shared := parts[rank].shared) is not None:
            beside = shared.out.double()
            if shared.gate is not None:
                beside *= torch.sigmoid(x.double() @ shared.gate.double().T)
            want += beside
        torch.testing.assert_close(sums[rank].double(), want, rtol=8 * step, atol=16 * step)
