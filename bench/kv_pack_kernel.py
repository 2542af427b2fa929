"""The Triton kernel of `bench.kv_pack`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def copy_pages(
    pool, staged, ids, num_pages, page_words, is_gather: tl.constexpr, block: tl.constexpr
):
    """Words of the pages `ids` of a pool into a staging buffer, or back; blocks in turn."""
    blocks = tl.cdiv(page_words, block)
    for index in range(tl.program_id(0), num_pages * blocks, tl.num_programs(0)):
        row = (index // blocks).to(tl.int64)
        page = tl.load(ids + row)
        words = (index % blocks) * block + tl.arange(0, block)
        within = words < page_words
        in_pool = pool + page * page_words + words
        in_staged = staged + row * page_words + words
        if is_gather:
            tl.store(in_staged, tl.load(in_pool, mask=within), mask=within)
        else:
            tl.store(in_pool, tl.load(in_staged, mask=within), mask=within)
