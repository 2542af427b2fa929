"""The dry run: a class of transformers runs once on tensors without numbers (PyTorch's device
`meta`), and what its attention asks for is recorded.

- Each call of attention becomes a layer of our config: heads, scale, window, cap, sinks.
- A mask is a function of positions. It is asked for some positions, and must be causal or a window.
- A class that reads numbers on the way, counts positions for itself, or changes a mask, cannot run
  over pages with many sequences in a step, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.config import UnsupportedModelError
from engine.model.wrapped import interfaces
from engine.model.wrapped.classes import BIASES, ENCODER, refusal

TOKENS: Final = 37
"""Tokens of the dry run. No model has such a dimension, so a range of so many counts tokens."""
PROBES: Final = (0, 1, 5, 63, 64, 1000, 8191, 8192, (1 << 17) + 777)
"""Positions whose masks are looked at. A window that is longer than the last one is none."""
HARMLESS: Final = {
    *("dropout", "training", "deterministic", "use_cache", "cache", "past_key_values"),
    *("position_ids", "position_embeddings", "cache_position", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "return_dict", "is_causal"),
}
"""Options of attention that say nothing about it, or are looked at by themselves."""
_REASONS: Final = {
    "position_bias": BIASES,
    "attention_bias": BIASES,
    "indices": "attention over tokens that an index chooses is not built",
}
"""Why an option of attention cannot be had, where that is known."""


class Attended(NamedTuple):
    """A call of attention."""

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    """Numbers of a head of K or of V, whichever are more."""
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: str
    """Name of the parameter; empty: none."""


class Record(NamedTuple):
    """What a dry run has found."""

    calls: tuple[Attended, ...]
    body: str
    """Name of the module that makes hidden states."""
    output: Any
    """Class of its output."""
    hidden_size: int
    vocab_size: int


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices ranges of as many numbers as there are tokens."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("arange", "cumsum") and isinstance(out, Tensor) and not out.is_floating_point():
            self.found |= out.dim() > 0 and out.shape[-1] == TOKENS
        return out


class _Run:
    """A dry run of one class."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self.calls: list[Attended] = []
        self._model = model
        self._masks: dict[int, tuple[Tensor, Any]] = {}
        """Masks with what they allow, by identity."""
        self._names = {id(each): name for name, each in model.named_parameters()}

    def masked(self, allows: Any, shape: tuple[int, int, int, int]) -> Tensor:
        """See `Recorder`."""
        mask = torch.empty(shape, dtype=torch.bool, device="meta")
        self._masks[id(mask)] = mask, allows
        return mask

    def attended(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """See `Recorder`."""
        if q.shape[0] != 1 or not q.shape[2] == k.shape[2] == v.shape[2] == TOKENS:
            raise refusal(self.name, "its attention reads something else than the tokens so far")
        others = [key for key in options if key not in (*HARMLESS, *_READ)]
        for key in others:
            if options[key] is not None:
                usual = f"its attention has an option {key} that is not known here"
                raise refusal(self.name, _REASONS.get(key, usual))
        scale, cap = options.get("scaling"), options.get("softcap")
        if not isinstance(scale, float | int | None) or not isinstance(cap, float | int | None):
            raise refusal(self.name, "a factor of its attention is no number")
        self.calls.append(
            Attended(
                module,
                q.shape[1],
                k.shape[1],
                max(k.shape[-1], v.shape[-1]),
                float(q.shape[-1] ** -0.5 if scale is None else scale),
                self._window(module, mask, options),
                None if cap is None else float(cap),
                self._sinks(options.get("s_aux")),
            )
        )
        return q.new_empty((1, TOKENS, q.shape[1], v.shape[-1]))

    def _window(self, module: nn.Module, mask: Any, options: dict[str, Any]) -> int | None:
        if options.get("is_causal", getattr(module, "is_causal", True)) is False and mask is None:
            raise refusal(self.name, ENCODER)
        if mask is None:
            window = options.get("sliding_window")
            return None if window is None else int(window)
        if id(mask) not in self._masks:
            raise refusal(self.name, "it changes the mask of its attention: " + BIASES)
        return self._window_of(self._masks[id(mask)][1])

    def _sinks(self, sinks: Any) -> str:
        if sinks is None:
            return ""
        if id(sinks) not in self._names:
            raise refusal(self.name, "the sinks of its attention are no weight of it")
        return self._names[id(sinks)]

    def _window_of(self, allows: Any) -> int | None:
        """The window of a mask; None: a position sees all before it."""
        nothing, windows = torch.zeros(1, dtype=torch.long), set()
        for at in PROBES:
            own, every = torch.tensor([at]), torch.arange(at + 64)
            try:
                seen = allows(nothing, nothing, own, every).expand(at + 64)
            except Exception as error:  # Of any kind: it is a function of the class.
                raise refusal(self.name, "its mask does not follow from positions") from error
            if bool(seen[at + 1 :].any()):
                raise refusal(self.name, ENCODER)
            count = int(seen.sum())
            if not bool(seen[at + 1 - count : at + 1].all()) or count == 0:
                raise refusal(self.name, "its attention is neither causal nor a window")
            if count <= at:
                windows.add(count)
        if len(windows) > 1:
            raise refusal(self.name, "what its attention sees is cut at borders of chunks")
        return windows.pop() if windows else None


_READ: Final = ("scaling", "softcap", "sliding_window", "s_aux")
"""Options of attention that are recorded."""


class _Entered:
    """Which module of a model makes its hidden states: the first of those that its head calls in
    which attention is called."""

    def __init__(self, model: nn.Module, run: _Run) -> None:
        self._run, self._depth = run, 0
        self._names = {id(module): name for name, module in model.named_modules()}
        self._before = 0
        self.body, self.hidden_size = "", 0
        self.output: Any = None

    def enter(self, _module: nn.Module, _args: Any) -> None:
        """A module is called."""
        self._depth += 1
        if self._depth == 2:
            self._before = len(self._run.calls)

    def leave(self, module: nn.Module, _args: Any, out: Any) -> None:
        """It has answered."""
        self._depth -= 1
        attends = len(self._run.calls) > self._before
        if self._depth == 1 and attends and not self.body:
            hidden = out[0]
            if isinstance(hidden, Tensor) and hidden.shape[:2] == (1, TOKENS):
                self.body, self.output = self._names[id(module)], type(out)
                self.hidden_size = hidden.shape[-1]


@contextmanager
def _hooked(entered: _Entered) -> Iterator[None]:
    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(entered.enter),
        hooks.register_module_forward_hook(entered.leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def record(name: str, model: nn.Module) -> Record:
    """Runs a model on the device `meta`.

    Args:
        name: of its class.
        model: of transformers.

    Raises:
        UnsupportedModelError: it cannot run over pages; it says why.
    """
    interfaces.use(model, interfaces.RECORDED)
    run = _Run(name, model)
    entered, counting = _Entered(model, run), _Counting()
    inputs = {key: _tokens() for key in ("input_ids", "position_ids", "attention_mask")}
    token = interfaces.recorder.set(run)
    try:
        with _hooked(entered), counting:
            out = model(**inputs, use_cache=False)
    except UnsupportedModelError:
        raise
    except Exception as error:  # Of any kind: it is the class's code.
        where = f"its code cannot run without numbers ({type(error).__name__})"
        raise refusal(name, where) from error
    finally:
        interfaces.recorder.reset(token)
    if not run.calls:
        raise refusal(name, "its attention does not ask transformers' table, as position biases do")
    if counting.found:
        raise refusal(name, "it counts positions for itself, and does not take those of a step")
    logits = getattr(out, "logits", None)
    if not entered.body or logits is None or logits.shape[:2] != (1, TOKENS):
        raise refusal(name, "its head is not behind its body")
    return Record(
        tuple(run.calls), entered.body, entered.output, entered.hidden_size, logits.shape[-1]
    )


def _tokens() -> Tensor:
    return torch.ones((1, TOKENS), dtype=torch.long, device="meta")
