"""The arithmetic of sampling, as functions of tensors. None of them waits for the device.

A row with a NaN yields some token within the vocabulary and leaves the other rows alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 256
"""Vocabulary ids in a block. The inverse CDF searches the sums of blocks first, then one block."""
_FEW = 512
"""Best tokens of a row that are ranked first, before the whole row is sorted."""
_BELOW_ONE = 1 - 2.0**-53
"""The largest float64 below 1: a draw never lands behind the last token."""


class Scores(NamedTuple):
    """Log probabilities under the model's own distribution."""

    logprob: Tensor
    """[R] float32, log probability of the given token."""
    top_ids: Tensor
    """[R, N] int64, best first."""
    top_logprobs: Tensor
    """[R, N] float32."""


class Drawn(NamedTuple):
    """Drawn tokens and their margins."""

    tokens: Tensor
    """[R] int64."""
    margin: Tensor
    """[R] float64: distance in probability from the drawn number to the nearer edge of the token's
    interval. Smaller arithmetic noise cannot change the token, unless it moves a token across an
    edge of min-p, top-k or top-p."""


def score(logits: Tensor, token_ids: Tensor, top_n: int) -> Scores:
    """Log probability of one token a row, and of the row's `top_n` best.

    Args:
        logits: [R, V] float32, the model's own.
        token_ids: [R] int64; for a prompt, the token that follows each row's position.
        top_n: at most V; 0 is allowed.
    """
    norm = logits.logsumexp(-1, keepdim=True)
    logprob = (logits.gather(-1, token_ids[:, None]) - norm).squeeze(-1)
    top_logits, top_ids = logits.topk(top_n)
    return Scores(logprob, top_ids, top_logits - norm)


def penalise(
    logits: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Penalises tokens seen before; returns new logits.

    Repetition follows CTRL (Keskar et al. 2019): positive logits are divided, negative ones
    multiplied. Frequency and presence follow the OpenAI API: `logit - frequency * count - presence
    * (count > 0)`.

    Args:
        logits: [R, V] float32.
        counts: [R, V] int32, occurrences in the output.
        in_prompt: [R, V] bool.
        repetition, frequency, presence: [R] float32.
    """
    in_output = counts > 0
    repetition = repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | in_output, repeated, logits)
    logits.addcmul_(counts.float(), frequency[:, None], value=-1)
    return logits.addcmul_(in_output.float(), presence[:, None], value=-1)


def mask(logits: Tensor, bits: Tensor) -> Tensor:
    """Minus infinity for tokens whose bit is clear; returns new logits.

    Args:
        logits: [R, V] float32.
        bits: [R, W] int32, at least V bits.
    """
    # By bytes: what is written on the way has a byte a token, not four.
    powers = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    is_clear = (bits.view(torch.uint8)[:, :, None] & powers).eq(0).view(len(bits), -1)
    return logits.masked_fill(is_clear[:, : logits.shape[-1]], float("-inf"))


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logit - best of the row) / temperature: 0 at the best, so no temperature overflows.

    Args:
        logits: [R, V] float32.
        temperature: [R] float32, above 0.
    """
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def nucleus_floor(
    ranked: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None = None
) -> Tensor:
    """The least logit that top-k and then top-p keep among those not below `floor`.

    Top-p keeps the fewest best tokens whose mass reaches its share of the mass that top-k left. It
    keeps each token whose better tokens have less mass than the share, so at least one.

    Args:
        ranked: [R, W] float32 from `scale`, a row's best logits in descending order.
        floor: [R] float32.
        top_k: [R] int64.
        top_p: [R] float64; infinite keeps all.
        total: [R] float64, mass that top-k left; None: `ranked` holds all of it.

    Returns:
        [R] float32, not below `floor`.
    """
    places = torch.arange(ranked.shape[-1], device=ranked.device)
    kept = (places < top_k[:, None]) & (ranked >= floor[:, None])
    mass = ranked.exp().double() * kept
    gone_by = mass.cumsum(-1)
    whole = gone_by[:, -1:] if total is None else total[:, None]
    kept &= gone_by - mass < top_p[:, None] * whole
    last = kept.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return ranked.gather(-1, last).squeeze(-1)


def wide_nucleus_floor(scaled: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`nucleus_floor` of whole rows, [R, V], which are sorted if necessary.

    On a CPU it costs nothing to read a result. So only those rows are sorted whose top-p share is
    not within their few best tokens. On other devices all rows are sorted.
    """
    vocab_size = scaled.shape[-1]
    if not scaled.is_cpu or vocab_size <= _FEW:
        return nucleus_floor(scaled.topk(vocab_size).values, floor, top_k, top_p)
    few = scaled.topk(_FEW).values
    total = _mass(scaled, floor)
    result = nucleus_floor(few, floor, top_k, top_p, total)
    within = (top_k >= vocab_size) & (_mass(few, floor) >= top_p * total)
    rest = (~within).nonzero().squeeze(-1)
    if len(rest):
        ranked = scaled[rest].topk(vocab_size).values
        result[rest] = nucleus_floor(ranked, floor[rest], top_k[rest], top_p[rest])
    return result


def _mass(scaled: Tensor, floor: Tensor) -> Tensor:
    """[R] float64, the sum of the weights that `floor` leaves."""
    return scaled.exp().masked_fill_(scaled < floor[:, None], 0).sum(-1).double()


def draw(scaled: Tensor, floor: Tensor | None, uniforms: Tensor) -> Drawn:
    """One token a row by inverse CDF in the order of the vocabulary.

    The token is the first whose cumulative weight exceeds `uniform * total`. The search goes over
    blocks of the vocabulary first, then within one block. This saves a cumulative sum of the whole
    row. A block's sum is float32 (relative error about 1e-7, like the weights themselves). All
    other sums are float64.

    Args:
        scaled: [R, V] float32 from `scale`.
        floor: [R] float32, tokens below it have no weight; None: all tokens have weight.
        uniforms: [R] float64 in (0, 1).
    """
    weights = scaled.exp()
    if floor is not None:
        weights.masked_fill_(scaled < floor[:, None], 0)
    blocks = _in_blocks(weights)
    upto = blocks.sum(-1).double().cumsum(-1)
    total = upto[:, -1:]
    target = uniforms[:, None] * total
    block = (upto <= target).sum(-1, keepdim=True).clamp_(max=upto.shape[-1] - 1)
    inside = blocks.take_along_dim(block[:, :, None], 1).squeeze(1).double()
    before = F.pad(upto, (1, 0)).gather(-1, block)
    ends = inside.cumsum(-1)
    # The two sums of a block may differ in their last bits, so stay below the end of its last
    # weight.
    rest = torch.minimum(target - before, ends[:, -1:] * _BELOW_ONE)
    place = (ends <= rest).sum(-1, keepdim=True).clamp_(max=_BLOCK - 1)
    end = ends.gather(-1, place)
    start = end - inside.gather(-1, place)
    margin = torch.minimum(rest - start, end - rest) / total
    tokens = (block * _BLOCK + place).clamp_(max=scaled.shape[-1] - 1)
    return Drawn(tokens.squeeze(-1), margin.squeeze(-1))


def _in_blocks(weights: Tensor) -> Tensor:
    """[R, V] -> [R, blocks, _BLOCK], the last block filled up with zeros."""
    missing = -weights.shape[-1] % _BLOCK
    padded = F.pad(weights, (0, missing)) if missing else weights
    return padded.view(len(weights), -1, _BLOCK)
