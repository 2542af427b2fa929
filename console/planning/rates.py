"""How fast GPUs are, as measured with one model, and scaled to another by its bytes and products.

One H100 and one H200 with the shape of Llama-3.1-8B (bench/README.md, bench/history). A prompt's
time goes with the parameters, a decode step's with the bytes of weights and KV that it reads.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from engine.step.grid import STAGE_CHUNKS

REFERENCE_PARAMETERS: Final = 8.03e9
REFERENCE_KV_BYTES: Final = 131_072
"""Parameters of Llama-3.1-8B, and bytes of a token's KV in bfloat16."""
RANKS_EFFICIENCY: Final = 0.83
"""Part of a rank's rate that is left with several: Llama 70B in FP8 on two H200, 13,791 prompt
tokens a second where two of one rank's would be 16,600."""
STAGES_EFFICIENCY: Final = 0.95
"""Part of a stage's rate that is left in prefill: 8B in two stages on H200s, 71,779 prompt tokens a
second in a queue where one GPU has 37,608."""


class Gpu(NamedTuple):
    """What was measured with the reference in bfloat16, seconds."""

    prefill_token_s: float
    """A prompt token of a large step, with nothing before it."""
    attend_s: float
    """Each token before it."""
    step_s: float
    """A decode step of one row without context."""
    several_s: float
    """What more rows than one add to it: their products run through other kernels."""
    row_s: float
    """Each row."""
    kv_token_s: float
    """Each token of context that a step reads."""
    memory_gb: float


GPUS: Final = {
    "h100": Gpu(21.6e-6, 0.77e-9, 5.7e-3, 0.3e-3, 5e-6, 51e-9, 80),
    "h200": Gpu(21.6e-6, 0.77e-9, 4.1e-3, 0.36e-3, 9e-6, 38e-9, 141),
}
"""Prompts: 45,478 tokens a second in prompts of 1,024, 40,405 in those of 8,192 (H200; 45,008 on an
H100). H100: 175 tokens a second, and a step of 64 rows of 1,152 tokens in 10.06 ms, of which
FlashAttention-3 takes 118 us a layer. H200: steps without context take 4.08, 4.55 and 5.18 ms with
1, 8 and 64 rows, and one of 4 rows of 8,000 tokens 5.71; KV by its bandwidth."""
FP8_PREFILL: Final = 0.62
FP8_STEP: Final = 0.57
"""Parts of the times in bfloat16 that FP8 weights take: 73,071 prompt tokens and 305.6 tokens a
second on an H100."""
ROUTER_S: Final = 3e-3
"""From a request's arrival to its prefill worker, and from a first token to its client."""
HAND_OFF_S: Final = 4e-3
"""From a prompt's end until its row may join a step: 2 ms to the last page, the rest until a step
is launched with it. On H200s the second token came 10.8 to 13.8 ms after the first (medians), of
which one and a half steps are 7.2 to 8.6."""
ROUTER_IDLE: Final = 0.35
ROUTER_TOKEN_S: Final = 84e-6
ROUTER_BUSY: Final = 0.65
"""A router process takes so much of a core beside four workers, and for each token of a stream
(thirteen runs on H200s, within 0.1 of a core). Above this part of a core gaps between tokens are
uneven: of two loads, 99 % kept 12 ms with 0.49 and 0.54, and 86 and 81 % with 0.70 and 0.84. Not
tuned between these."""
PREFILL_STEP_S: Final = 2e-3
"""A step's launch and end."""
CHUNK_SHARE: Final = 0.66
"""What a prompt's token takes in a chunk beside decode rows, as a part of what it takes in a large
step: the rows read the weights anyway. On an H200, 192 tokens make a step of 40 rows 2.8 ms
longer."""


class Rates(NamedTuple):
    """Times of one worker, seconds."""

    prefill_token_s: float
    """A prompt token, with other prompts behind it."""
    attend_s: float
    step_s: float
    several_s: float
    row_s: float
    kv_token_s: float
    kv_tokens: int
    """Tokens of KV that fit."""
    stages: int = 1

    def decode_s(self, rows: int, context: int) -> float:
        """From a token of each row to the next. Of several stages, each runs the step of a part of
        the rows, which goes through all of them."""
        several_s = self.several_s if rows > 1 else 0.0
        of_rows = rows * self.row_s + context * self.kv_token_s
        return self.step_s + several_s + of_rows / self.stages

    def prompt_s(self, tokens: int, before: int = 0, share: float = 1.0) -> float:
        """So many tokens of a prompt. `before`: computed already. `share`: what products take, as a
        part of what they take in a large step."""
        attended = tokens * (before + tokens / 2)
        return tokens * self.prefill_token_s * share + attended * self.attend_s

    def lag_s(self, tokens: int) -> float:
        """How long the end of a prompt takes through the later stages, while the first one has the
        next prompt."""
        return self.prompt_s(tokens) * (self.stages - 1) / (STAGE_CHUNKS * self.stages)


def routers_for(tokens_a_second: float) -> int:
    """Router processes that so many tokens of all streams together need."""
    return max(1, math.ceil(tokens_a_second * ROUTER_TOKEN_S / (ROUTER_BUSY - ROUTER_IDLE)))


def rates_of(
    gpu: Gpu, parameters: float, kv_bytes: int, ranks: int, *, fp8: bool, stages: int = 1
) -> Rates:
    """The rates of a worker.

    Args:
        gpu: each of its GPUs.
        parameters: of the model.
        kv_bytes: of a token, in bfloat16.
        ranks: GPUs of each stage.
        fp8: whether weights are in FP8.
        stages: one behind the other.
    """
    size = parameters / REFERENCE_PARAMETERS
    kv = kv_bytes / REFERENCE_KV_BYTES
    shared = ranks * (RANKS_EFFICIENCY if ranks > 1 else 1)
    weights = parameters * (1 if fp8 else 2)
    free = (0.9e9 * gpu.memory_gb - 3e9) * ranks * stages - weights
    at_once = stages * (STAGES_EFFICIENCY if stages > 1 else 1)
    step = size / shared * (FP8_STEP if fp8 else 1)
    return Rates(
        gpu.prefill_token_s * size / shared / at_once * (FP8_PREFILL if fp8 else 1),
        gpu.attend_s * size / shared / at_once,
        gpu.step_s * step,
        gpu.several_s * step,
        gpu.row_s,
        gpu.kv_token_s * kv / shared,
        int(free // kv_bytes),
        stages,
    )
