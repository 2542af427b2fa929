"""How fast GPUs are, as measured with one model, and scaled to another by its bytes and products.

One H100 and one H200 with the shape of Llama-3.1-8B (bench/README.md, bench/history). A prompt's
time goes with the parameters, a decode step's with the bytes of weights and KV that it reads.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from engine.step.lanes import STAGE_CHUNKS

REFERENCE_PARAMETERS: Final = 8.03e9
REFERENCE_KV_BYTES: Final = 131_072
"""Parameters of Llama-3.1-8B, and bytes of a token's KV in bfloat16."""
RANKS_EFFICIENCY: Final = 0.83
"""Part of a rank's rate that is left with several: Llama 70B in FP8 on two H200, 13,791 prompt
tokens a second where two of one rank's would be 16,600."""
STAGES_EFFICIENCY: Final = 0.95
"""Part of a stage's rate that is left in prefill: stages are not divided quite evenly. Not measured
yet."""


class Gpu(NamedTuple):
    """What was measured with the reference in bfloat16, seconds."""

    prefill_token_s: float
    """A prompt token of a large step."""
    step_s: float
    """A decode step of one row without context."""
    row_s: float
    """Each further row."""
    kv_token_s: float
    """Each token of context that a step reads."""
    memory_gb: float


GPUS: Final = {
    "h100": Gpu(22.2e-6, 5.7e-3, 5e-6, 51e-9, 80),
    "h200": Gpu(22.2e-6, 4.2e-3, 4e-6, 38e-9, 141),
}
"""H100: bench.engine, 45,008 prompt tokens and 175 tokens a second; FlashAttention-3 over 64 rows
of 1,152 tokens, 118 us a layer. H200: 240 tokens a second, and KV by its bandwidth."""
FP8_PREFILL: Final = 0.62
FP8_STEP: Final = 0.57
"""Parts of the times in bfloat16 that FP8 weights take: 73,071 prompt tokens and 305.6 tokens a
second on an H100."""
ROUTER_S: Final = 3e-3
"""From a request's arrival to its prefill worker, and from a first token to its client."""
HAND_OFF_S: Final = 6.5e-3
"""From a prompt's end to the step that its row joins: 2 ms to the last page, the rest until a step
is launched with it. On an H100, whose steps take 6.5 ms, the second token came 13 to 18 ms after
the first."""
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
    step_s: float
    row_s: float
    kv_token_s: float
    kv_tokens: int
    """Tokens of KV that fit."""
    stages: int = 1

    def decode_s(self, rows: int, context: int) -> float:
        """From a token of each row to the next. Of several stages, each runs the step of a part of
        the rows, which goes through all of them."""
        of_rows = rows * self.row_s + context * self.kv_token_s
        return self.step_s + of_rows / self.stages

    def lag_s(self, tokens: int) -> float:
        """How long the end of a prompt takes through the later stages, while the first one has the
        next prompt."""
        return tokens * self.prefill_token_s * (self.stages - 1) / (STAGE_CHUNKS * self.stages)


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
    return Rates(
        gpu.prefill_token_s * size / shared / at_once * (FP8_PREFILL if fp8 else 1),
        gpu.step_s * size / shared * (FP8_STEP if fp8 else 1),
        gpu.row_s,
        gpu.kv_token_s * kv / shared,
        int(free // kv_bytes),
        stages,
    )
