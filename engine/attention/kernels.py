"""The kernels of our own that backends take. `engine.cuda.attention_kernels` has them."""

from __future__ import annotations

from typing import Protocol

from engine.attention.fa3 import DecodeKernel
from engine.attention.fa3_gathered import Gather
from engine.attention.triton import PromptKernel
from engine.pool.kv_pool import KvPool


class OwnKernels(Protocol):
    """A kernel is imported when a backend asks for it, because some machines cannot import it."""

    def decode(self) -> DecodeKernel:
        """Attention of decode rows over pages in 16 bits."""
        ...

    def decode_fp8(self) -> DecodeKernel:
        """Decode attention over pages in FP8."""
        ...

    def gather(self, pool: KvPool) -> Gather:
        """Gathers contexts from such a pool, in 16 bits."""
        ...

    def prompt(self) -> PromptKernel:
        """Attention of prompts over pages in 16 bits."""
        ...

    def decode_latents(self) -> DecodeKernel:
        """Attention of decode rows over pages of latents."""
        ...

    def prompt_latents(self) -> PromptKernel:
        """Attention of prompts over pages of latents."""
        ...
