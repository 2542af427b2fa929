"""vLLM's flags and what stands for them here.

The command line answers a flag of vLLM from this table, and `LLM` an argument of vLLM's. The page
`docs/coming-from-vllm.md` shows it. The flags are those of `vllm serve`:
https://docs.vllm.ai/en/latest/cli/serve/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

SAME: Final = "the same"
_STAGES: Final = "`--pp` of `baton worker`"
_HOSTS: Final = "of `baton worker`, the same command on each host ([Several hosts](hosts.md))"
_RANKS: Final = "`--tp` of `baton worker`"
_GROUPS: Final = (
    "`--both` of `baton up`: workers that do both legs; with `--share-experts` they hold a model's"
    " experts together, as `--expert-group` of `baton worker` does"
    " ([Experts](experts.md#expert-groups))"
)
_EXPERTS: Final = (
    "`--expert-parallel` of `baton worker`, beside `--tp`; `--share-experts` of `baton up` where"
    " vLLM has `--data-parallel-size`"
)
_RANK_OF_GROUP: Final = "R in `--expert-group FOLDER?rank=R&ranks=N` of each `baton worker`"
_ONE_HOST: Final = "not yet: an expert group is on one host, where its workers meet in a folder"
_ROUTED: Final = "nothing: routers know each worker, and choose one for each request"
_ONE_PLACE: Final = "not yet: an expert is on one rank, or on one worker of its group"
_IN_CONFIG: Final = "nothing: change `config.json` in the model's folder"
_BY_TEMPLATE: Final = "nothing: the chat template shows how a model calls tools and thinks"

FLAGS: Final[Mapping[str, str]] = {
    "--all2all-backend": "nothing: tokens move by our kernels, or by NCCL where GPUs share no"
    " memory",
    "--allowed-origins": "`--allowed-origins` of `baton router`, with commas between origins",
    "--api-key": SAME,
    "--api-server-count": "`--routers` of `baton up`",
    "--async-scheduling": "nothing: a step is launched while the one before it runs",
    "--attention-backend": "the variable `BATON_DEBUG_ATTENTION`",
    "--block-size": "the variable `BATON_DEBUG_PAGE_SIZE_TOKENS`",
    "--chat-template": SAME,
    "--calculate-kv-scales": "nothing: `--kv-cache-dtype fp8` has no scales",
    "--cpu-offload-gb": "not yet: weights stay on the GPU",
    "--data-parallel-address": _ONE_HOST,
    "--data-parallel-external-lb": _ROUTED,
    "--data-parallel-hybrid-lb": _ROUTED,
    "--data-parallel-rank": _RANK_OF_GROUP,
    "--data-parallel-rpc-port": _ONE_HOST,
    "--data-parallel-size": _GROUPS,
    "-dp": _GROUPS,
    "--data-parallel-size-local": _ONE_HOST,
    "--data-parallel-start-rank": _RANK_OF_GROUP,
    "--default-chat-template-kwargs": "`chat_template_kwargs` in each request",
    "--device": "`--device` of `baton worker`",
    "--disable-log-requests": "nothing: prompts are never logged",
    "--disable-log-stats": "nothing: figures are at `/metrics`, and not in the log",
    "--distributed-executor-backend": "nothing: ranks are processes, and hosts join by `--nodes` of"
    " `baton worker` without Ray ([Several hosts](hosts.md))",
    "--download-dir": "`HF_HOME`, the variable of the Hugging Face library",
    "--dtype": "`--dtype` of `baton worker`",
    "--enable-auto-tool-choice": _BY_TEMPLATE,
    "--enable-chunked-prefill": "nothing: prompts are always computed in chunks",
    "--enable-eplb": _ONE_PLACE,
    "--enable-expert-parallel": _EXPERTS,
    "-ep": _EXPERTS,
    "--enable-log-requests": "nothing: prompts are never logged",
    "--enable-lora": "nothing: `--adapters` or `--adapters-dir` of `baton worker` turns them on"
    " ([Adapters](adapters.md))",
    "--enable-prefix-caching": "nothing: it is on; `BATON_DEBUG_PREFIX_CACHE=false` ends it",
    "--enable-prompt-tokens-details": "nothing: usage always has `cached_tokens`",
    "--enforce-eager": "nothing: graphs are captured within seconds",
    "--eplb-config": _ONE_PLACE,
    "--expert-placement-strategy": "nothing: it is always `round_robin`",
    "--generation-config": "`BATON_DEBUG_GENERATION_CONFIG=false` stands for `vllm`",
    "--gpu-memory-utilization": "`--gpu-memory-utilization` of `baton worker`",
    "--guided-decoding-backend": "nothing: it is always llguidance",
    "--headless": "nothing: a host whose `--node` is not 0 serves no clients"
    " ([Several hosts](hosts.md))",
    "--host": "`--host` of `baton up`",
    "--hf-overrides": _IN_CONFIG,
    "--hf-token": "`HF_TOKEN`, the variable of the Hugging Face library",
    "--kv-cache-dtype": "`--kv-cache-dtype` of `baton worker`: `auto`, or `fp8` without scales",
    "--kv-cache-memory-bytes": "`--kv-memory-gib`",
    "--kv-offloading-size": "`--kv-host-gib` of `baton worker`",
    "--kv-transfer-config": "nothing: `baton prefill` and `baton decode` find each other",
    "--limit-mm-per-prompt": "nothing: prompts are text",
    "--load-format": "the variable `BATON_DEBUG_LOAD_FORMAT`",
    "--lora-modules": "`--adapters NAME=FOLDER` of `baton worker`, with commas between",
    "--master-addr": f"`--leader HOST` {_HOSTS}",
    "--master-port": f"`--leader HOST:PORT` {_HOSTS}",
    "--max-cpu-loras": "the variable `BATON_DEBUG_ADAPTERS_HOST_GIB`: it bounds their bytes",
    "--max-lora-rank": "the variable `BATON_DEBUG_MAX_ADAPTER_RANK`",
    "--max-loras": "the variable `BATON_DEBUG_MAX_ADAPTERS`",
    "--max-logprobs": "nothing: up to 20 are answered",
    "--max-model-len": "`--max-context-tokens` of `baton worker`",
    "--max-num-batched-tokens": "the variable `BATON_DEBUG_MAX_STEP_TOKENS`",
    "--max-num-seqs": "`--max-sequences` of `baton worker`",
    "--model-impl": "`--model-impl` of `baton worker`: `auto`, `native` (for `vllm`) or"
    " `transformers`",
    "--nnodes": f"`--nodes` {_HOSTS}",
    "--node-rank": f"`--node` {_HOSTS}",
    "--no-enable-prefix-caching": "the variable `BATON_DEBUG_PREFIX_CACHE=false`",
    "--num-gpu-blocks-override": "the variable `BATON_DEBUG_NUM_PAGES`",
    "--otlp-traces-endpoint": "`--otlp-endpoint` of `baton router` and `baton worker`",
    "--pipeline-parallel-size": _STAGES,
    "-pp": _STAGES,
    "--port": "`--http-port` of `baton up`; `--port` is gRPC's",
    "--quantization": "`--quantization fp8` of `baton worker` for float checkpoints; else nothing",
    "--reasoning-parser": _BY_TEMPLATE,
    "--revision": "`@REVISION` behind the id: `--model ORG/NAME@REVISION`",
    "--rope-scaling": _IN_CONFIG,
    "--rope-theta": _IN_CONFIG,
    "--root-path": "nothing: a proxy in front can take paths away",
    "--scheduling-policy": "`--scheduling` of `baton worker`",
    "--seed": "`seed` in each request",
    "--served-model-name": "`--served-name` of `baton worker`",
    "--speculative-config": "`--speculation suffix` of `baton worker` for the methods `ngram` and"
    " `suffix`, `--speculation FOLDER` for `eagle3` (its `model`), `--speculation mtp` for `mtp`,"
    " `--draft-tokens` for `num_speculative_tokens`; nothing yet for draft models",
    "--ssl-ca-certs": "`--tls-client-ca` of `baton router`",
    "--ssl-certfile": "`--tls-door-cert` of `baton router`",
    "--ssl-keyfile": "`--tls-door-key` of `baton router`",
    "--structured-outputs-config": "nothing: the backend is always llguidance",
    "--swap-space": "`--kv-host-gib` of `baton worker`",
    "--tensor-parallel-size": _RANKS,
    "-tp": _RANKS,
    "--tokenizer": "nothing: the tokenizer is in the model's folder",
    "--tool-call-parser": _BY_TEMPLATE,
    "--trust-remote-code": "nothing: code of a model never runs",
    "--uvicorn-log-level": "the variable `BATON_DEBUG_LOG_LEVEL`",
}
"""What to use instead, as Markdown."""


_LINK: Final = re.compile(r"\[[^]]+\]\(([^)#]+)[^)]*\)")
"""A link of Markdown; its group is the page."""
_SHORT: Final = {"-t": "-tp", "-p": "-pp", "-d": "-dp", "-e": "-ep"}
"""Options as a command line without them reads them."""


def answer(flag: str) -> str | None:
    """What to answer somebody who used a flag of vLLM; None if it is none."""
    flag = flag.partition("=")[0].replace("_", "-")
    flag = _SHORT.get(flag, flag)
    if (ours := FLAGS.get(flag)) is None:
        return None
    variable = _variable(ours)
    also = f" ({variable} sets it under `baton up`)" if variable else ""
    return f"{flag} is vLLM's. Here: {_plain(ours)}{also}".replace("`", "")


def answer_setting(name: str) -> str | None:
    """What to answer somebody who set an argument of vLLM's `LLM`; None if it is none."""
    ours = FLAGS.get(f"--{name.replace('_', '-')}")
    return None if ours is None else f"vLLM's; here: {_plain(ours)}".replace("`", "")


def _plain(ours: str) -> str:
    """Names a page in place of a link to it."""
    return _LINK.sub(r"docs/\1", ours)


def _variable(ours: str) -> str:
    """The variable of a worker's flag."""
    if not ours.endswith("of `baton worker`"):
        return ""
    name = ours.partition("`")[2].partition("`")[0]
    if name.startswith("--no-"):
        return f"BATON_{name[5:].replace('-', '_').upper()}=false"
    return f"BATON_{name[2:].replace('-', '_').upper()}"
