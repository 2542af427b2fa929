"""What `transformers.generate` makes of the same shape: tokens a second, the naive way.

python -m bench.transformers_baseline [--prompt 256] [--output 256] [--batches 1 32 256]

Random weights in bfloat16 on one GPU, SDPA attention, dynamic cache, greedy, lengths forced. A
batch is static: all of it starts and ends together, which flatters it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

SHAPE = Path(__file__).parent / "shapes" / "llama-8b"


def load(device: str) -> Any:
    """The model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(SHAPE)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@torch.inference_mode()
def rate(model: Any, batch: int, prompt: int, output: int) -> float:
    """Output tokens a second, prefill included."""
    ids = torch.randint(3, 100_000, (batch, prompt), device=model.device)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=output,
        min_new_tokens=output,
        do_sample=False,
        pad_token_id=0,
    )
    torch.cuda.synchronize()
    return batch * output / (time.perf_counter() - begin)


def main() -> None:
    """Prints a line per batch size, and the same as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    arguments = parser.parse_args()
    model = load("cuda")
    rate(model, 1, arguments.prompt, 8)
    rates = {}
    for batch in arguments.batches:
        rates[batch] = rate(model, batch, arguments.prompt, arguments.output)
        print(f"batch {batch:4d}: {rates[batch]:10,.1f} tokens/s", flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), "rates": rates}))


if __name__ == "__main__":
    main()
