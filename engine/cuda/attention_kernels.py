"""The kernels that attention backends take (`engine.attention.kernels.OwnKernels`)."""

from __future__ import annotations

from engine.attention.fa3 import DecodeKernel
from engine.attention.fa3_gathered import Gather
from engine.attention.triton import PromptKernel
from engine.pool.kv_pool import KvPool


class CudaKernels:
    """Imports each kernel when it is asked for, because some machines cannot import it."""

    def decode(self) -> DecodeKernel:
        """See `OwnKernels`."""
        from engine.cuda.decode_attention import decode_attention

        return decode_attention

    def decode_fp8(self) -> DecodeKernel:
        """See `OwnKernels`."""
        from engine.cuda.kv.fp8_decode import decode_attention_fp8

        return decode_attention_fp8

    def gather(self, pool: KvPool) -> Gather:
        """See `OwnKernels`."""
        from engine.cuda.kv.fp8_gather import Gatherer

        return Gatherer(pool)

    def prompt(self) -> PromptKernel:
        """See `OwnKernels`."""
        from engine.cuda.kv.prompt_attention import prompt_attention

        return prompt_attention

    def decode_latents(self) -> DecodeKernel:
        """See `OwnKernels`."""
        from engine.cuda.kv.latent_decode import decode_latents

        return decode_latents

    def prompt_latents(self) -> PromptKernel:
        """See `OwnKernels`."""
        from engine.cuda.kv.latent_prompt import prompt_latents

        return prompt_latents
