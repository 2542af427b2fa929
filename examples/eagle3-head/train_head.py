"""Trains a small EAGLE-3 head for a model of the Llama family, with PyTorch and transformers alone.

    python train_head.py MODEL TEXT ... --out FOLDER [--pieces 192] [--steps 300] [--threads 1]

MODEL is a folder of Hugging Face, and a TEXT a file of the kind that will be asked for. The head is
written in the original format (`LlamaForCausalLMEagle3`), for `baton worker --speculation FOLDER`.

What is learnt (Li et al. 2025, arXiv 2503.01840, section 3):

1. The model goes on from pieces of the texts, greedy and drawn.
2. It reads all of that once. Hidden states of three layers are kept, and its best next tokens.
3. At place i the head gets these states and token i + 1, and learns the model's token i + 2. In a
   second pass its own output takes the place of the states, as it will when it drafts further.

A head that is worth its place learns from some hundred thousand chats, on a GPU. This one shows
every step in minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT, LENGTH = 24, 128
"""Tokens of a piece of text, and of a piece with what the model says to it."""
TOGETHER = 96
"""Pieces that the model goes on from at once."""
ROWS = 6
"""Pieces of a step of training."""
DRAFTED = 4096
"""Most tokens that the head may draft: the most frequent ones."""


class Lesson(NamedTuple):
    """What is learnt from, [N, L] pieces."""

    ids: Tensor
    """[N, L]."""
    taps: Tensor
    """[N, L, 3 * H], hidden states."""
    best: Tensor
    """[N, L], the model's token behind each."""


class Head(nn.Module):
    """An EAGLE-3 head. [B, L] pieces, H hidden size, V tokens that may be drafted."""

    def __init__(self, model: Any, tokens: Tensor, taps: Sequence[int]) -> None:
        """`tokens`: [V], what may be drafted, in ascending order."""
        super().__init__()
        config = model.config
        hidden, self.heads, self.kv = (
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
        )  # fmt: skip
        self.dim, self.eps = hidden // self.heads, config.rms_norm_eps
        self.theta = float(config.rope_parameters["rope_theta"])
        self.taps, self.tokens = list(taps), tokens
        self.embed_tokens = model.get_input_embeddings().weight.detach().float()

        def product(rows: int, columns: int) -> nn.Linear:
            made = nn.Linear(columns, rows, bias=False)
            nn.init.normal_(made.weight, std=0.5 * columns**-0.5)
            return made

        self.fc = product(hidden, 3 * hidden)
        with torch.no_grad():  # At first, what the last of the three says.
            self.fc.weight[:, : 2 * hidden].mul_(0.1)
            self.fc.weight[:, 2 * hidden :] = torch.eye(hidden)
        wide = config.intermediate_size
        self.products = nn.ModuleDict(
            {
                "self_attn_q": product(self.heads * self.dim, 2 * hidden),
                "self_attn_k": product(self.kv * self.dim, 2 * hidden),
                "self_attn_v": product(self.kv * self.dim, 2 * hidden),
                "self_attn_o": product(hidden, self.heads * self.dim),
                "mlp_gate": product(wide, hidden),
                "mlp_up": product(wide, hidden),
                "mlp_down": product(hidden, wide),
            }
        )
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.gains = nn.ParameterDict({name: nn.Parameter(torch.ones(hidden)) for name in names})
        with torch.no_grad():
            self.gains["norm"].copy_(model.model.norm.weight)
        head = model.get_output_embeddings().weight.detach().float()
        self.lm_head = nn.Parameter(head[tokens].clone())

    def passes(self, lesson: Lesson) -> Iterator[Tensor]:
        """Logits [B, L - 1, V] behind the model's states, then behind the head's own."""
        features = self.fc(lesson.taps[:, :-1])
        embedded = self._normed(self.embed_tokens[lesson.ids[:, 1:]], "input_layernorm")
        hidden, kept = self._layer(features, embedded, None)
        yield self._logits(hidden)
        own = torch.cat((features[:, :1], hidden[:, :-1]), dim=1)
        yield self._logits(self._layer(own, embedded, kept)[0])

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._normed(hidden, "norm") @ self.lm_head.T

    def _layer(
        self, features: Tensor, embedded: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One pass, and its K and V. `before`: those of the pass before, which each place sees of
        all places but its own."""
        x = torch.cat((embedded, self._normed(features, "hidden_norm")), dim=-1)
        q, k, v = (self._heads(self.products[f"self_attn_{name}"](x)) for name in "qkv")
        q, k = self._turned(q), self._turned(k)
        group = self.heads // self.kv
        k, v = (each.repeat_interleave(group, 1) for each in (k, v))
        if before is None:
            read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            length, scale = q.shape[2], self.dim**-0.5
            seen = torch.ones(length, length, dtype=torch.bool).tril(-1)
            scores = (q @ before[0].mT * scale).masked_fill(~seen, -torch.inf)
            own = (q * k).sum(-1, keepdim=True) * scale
            shares = torch.cat((scores, own), -1).softmax(-1)
            read = shares[..., :-1].to(v.dtype) @ before[1] + shares[..., -1:] * v
        x = features + self.products["self_attn_o"](read.transpose(1, 2).flatten(2))
        normed = self._normed(x, "post_attention_layernorm")
        gate, up = (self.products[f"mlp_{name}"](normed) for name in ("gate", "up"))
        return x + self.products["mlp_down"](F.silu(gate) * up), (k, v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        """With the rotation of each place: [B, heads, L, D]."""
        frequencies = self.theta ** -(torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.arange(x.shape[2])[:, None] * frequencies
        cos, sin = (torch.cat((f(angles),) * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.gains[name], self.eps)

    def write(self, folder: Path, model: Any) -> None:
        """Writes the head in the original format."""
        folder.mkdir(parents=True, exist_ok=True)
        layer = "midlayer"
        tensors = {"fc.weight": self.fc.weight, "lm_head.weight": self.lm_head}
        for name, each in self.products.items():
            part, _, letter = name.rpartition("_")
            tensors[f"{layer}.{part}.{letter}_proj.weight"] = each.weight
        for name, gain in self.gains.items():
            tensors["norm.weight" if name == "norm" else f"{layer}.{name}.weight"] = gain
        vocab = model.config.vocab_size
        whole = {name: each.detach().float().contiguous() for name, each in tensors.items()}
        whole["d2t"] = self.tokens - torch.arange(len(self.tokens))
        whole["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, self.tokens, True)
        save_file(whole, folder / "model.safetensors")
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_size": model.config.hidden_size,
            "intermediate_size": model.config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "head_dim": self.dim,
            "vocab_size": vocab,
            "draft_vocab_size": len(self.tokens),
            "max_position_embeddings": model.config.max_position_embeddings,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self.taps},
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2))


@torch.inference_mode()
def said(model: Any, pieces: Tensor, temperature: float) -> Tensor:
    """[N, PROMPT] pieces of text -> [N, LENGTH], with what the model says to them."""
    ids, past, newest = pieces, None, pieces
    for _ in range(LENGTH - PROMPT):
        out = model(newest, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, logits = out.past_key_values, out.logits[:, -1].float()
        if temperature:
            newest = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            newest = logits.argmax(-1, keepdim=True)
        ids = torch.cat((ids, newest), dim=1)
    return ids


@torch.inference_mode()
def lesson_of(model: Any, ids: Tensor, taps: Sequence[int]) -> Lesson:
    """Reads [N, L] tokens once."""
    states, best = [], []
    for some in ids.split(8):
        out = model(some, output_hidden_states=True)
        states.append(torch.cat([out.hidden_states[tap] for tap in taps], -1))
        best.append(out.logits.argmax(-1))
    return Lesson(ids, torch.cat(states), torch.cat(best))


def train(model: Any, tokenizer: Any, texts: Sequence[str], pieces: int, steps: int) -> Head:
    """Trains a head on so many pieces of these texts."""
    layers = model.config.num_hidden_layers
    taps = [2, layers // 2, layers - 3]
    ids = torch.cat([torch.tensor(tokenizer(text)["input_ids"]) for text in texts])
    starts = torch.randint(len(ids) - PROMPT, (pieces, 1))
    cut = ids[starts + torch.arange(PROMPT)].split(TOGETHER)
    spoken = [said(model, some, 0.7 if turn % 3 == 2 else 0.0) for turn, some in enumerate(cut)]
    lesson = lesson_of(model, torch.cat(spoken), taps)
    counts = torch.bincount(lesson.best.flatten(), minlength=model.config.vocab_size)
    tokens = counts.topk(min(DRAFTED, int((counts > 0).sum()))).indices.sort().values
    head = Head(model, tokens, taps)
    place = torch.full((model.config.vocab_size,), -100)
    place[tokens] = torch.arange(len(tokens))
    tell(f"{lesson.ids.numel()} tokens said, {len(tokens)} may be drafted")
    _fit(head, lesson._replace(best=place[lesson.best]), steps)
    return head


def tell(what: str) -> None:
    """Prints it with the time of the processors so far."""
    print(f"{time.process_time():6.0f} s: {what}", flush=True)


def _fit(head: Head, lesson: Lesson, steps: int) -> None:
    rate = 1e-3
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        left = 1 - step / steps
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20, 0.05 + 1.5 * left)
        chosen = torch.randint(len(lesson.ids), (ROWS,))
        some = Lesson(*(each[chosen] for each in lesson))
        wanted, losses = some.best[:, 1:].flatten(), []
        with torch.autocast("cpu", torch.bfloat16):
            for logits in head.passes(some._replace(taps=some.taps.float())):
                flat = logits.float().flatten(0, 1)
                losses.append(F.cross_entropy(flat, wanted))
                right = (flat.argmax(-1) == wanted).float().mean()
        optimizer.zero_grad(set_to_none=True)
        sum(losses, torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            told = " ".join(f"{float(loss.detach()):.2f}" for loss in losses)
            tell(f"step {step}: losses {told}, {float(right):.2f} right")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pieces", type=int, default=192)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).eval()
    texts = [path.read_text() for path in given.texts]
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    train(model, tokenizer, texts, given.pieces, given.steps).write(given.out, model)


if __name__ == "__main__":
    main()
