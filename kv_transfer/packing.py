"""Pages gathered into a staging buffer, and scattered out of it.

On a GPU a kernel of few blocks does it: it moves pages faster than any wire, and leaves room for
the blocks of a collective library, which otherwise wait until those of a kernel that fills the GPU
have ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_WORDS = 2048


def gather(pool: Tensor, ids: Tensor, staged: Tensor, blocks: int) -> None:
    """Queues the copy of some pages into a buffer.

    Args:
        pool: [N, words].
        ids: [n] int64, on the pool's device.
        staged: [n, words], like `pool`.
        blocks: of the kernel; 0: as torch does it, which fills the GPU.
    """
    if blocks and pool.is_cuda:
        _copy(pool, ids, staged, blocks, is_gather=True)
    else:
        torch.index_select(pool, 0, ids, out=staged)


def scatter(pool: Tensor, ids: Tensor, staged: Tensor, blocks: int) -> None:
    """Queues the copy of a buffer into some pages; arguments as for `gather`."""
    if blocks and pool.is_cuda:
        _copy(pool, ids, staged, blocks, is_gather=False)
    else:
        pool.index_copy_(0, ids, staged)


def _copy(pool: Tensor, ids: Tensor, staged: Tensor, blocks: int, is_gather: bool) -> None:
    from kv_transfer.pack_kernel import copy_pages  # Triton, which there is where there are GPUs

    copy_pages[(blocks,)](
        pool, staged, ids, len(ids), pool.shape[1], is_gather, BLOCK_WORDS, num_warps=8
    )
