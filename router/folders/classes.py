"""The tokenizer classes of transformers, as far as models of our families name them.

Most take `tokenizer.json` as it is. Some take only its vocabulary and merges, and have their own
way of splitting a text and of joining tokens: a text then has other tokens than the file alone
gives. These are built here of the same parts, by transformers 5.24's rules. A class that is neither
is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

Given = Mapping[str, Any]
"""`tokenizer_config.json`, and what belongs to it."""
Build = Callable[[dict[str, int], list[tuple[str, str]], Given], tokenizers.Tokenizer]
"""Builds a tokenizer of vocabulary, merges and config."""

_QWEN_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END: Final = "<|endoftext|>"


class TokenizerError(Exception):
    """A model's tokenizer cannot be read as transformers reads it; the message says why."""


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """How a class reads a folder."""

    build: Build | None = None
    """None: `tokenizer.json` as it is."""
    special: Mapping[str, str] = field(default_factory=dict)
    """Special tokens that a config need not name."""
    extra: tuple[str, ...] = ()
    """Further ones, without names."""
    adds_last: bool = False
    """Whether special tokens are added once more, with the usual properties."""
    around: Literal["as the file says", "nothing", "begin"] = "as the file says"
    """Tokens around a text: `begin` is `bos_token`."""


def text_of(token: Any) -> str:
    """The text of a special token, which may be stated with its properties."""
    content = token.get("content") if isinstance(token, dict) else getattr(token, "content", token)
    if not isinstance(content, str):
        raise TokenizerError("a special token of the tokenizer has no text")
    return content


def _words(names: str) -> frozenset[str]:
    return frozenset(f"{name}Tokenizer" for name in names.split())


def _llama(vocab: dict[str, int], merges: list[tuple[str, str]], given: Given) -> Any:
    """Sentencepiece's: a space before the text, or before every part of it."""
    spaced = given.get("add_prefix_space")
    spaced = True if spaced is None else bool(spaced)
    scheme = "never"
    if spaced:
        scheme = "always" if given.get("legacy", False) else "first"
    return _by_pieces(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True), scheme, spaced
    )


def _code_llama(vocab: dict[str, int], merges: list[tuple[str, str]], given: Given) -> Any:
    spaced = given.get("add_prefix_space", True)
    scheme = "first" if spaced is None or spaced else "never"
    unknown = text_of(given["unk_token"])
    model = models.BPE(
        vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown
    )
    return _by_pieces(model, scheme, strips=True)


def _by_pieces(model: Any, scheme: str, strips: bool) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(model)
    found.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        parts.append(decoders.Strip(content=" ", left=1))
    found.decoder = decoders.Sequence(parts)
    return found


def _gemma(vocab: dict[str, int], merges: list[tuple[str, str]], given: Given) -> Any:
    unknown = text_of(given["unk_token"])
    found = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=True, unk_token=unknown, byte_fallback=True)
    )
    found.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    found.normalizer = normalizers.Replace(" ", "▁")
    return found


def _qwen_2(vocab: dict[str, int], merges: list[tuple[str, str]], given: Given) -> Any:
    found = _by_bytes(vocab, merges)
    found.normalizer = normalizers.NFC()
    spaced = bool(given.get("add_prefix_space"))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False),
        ]
    )
    return found


def _gpt_2(vocab: dict[str, int], merges: list[tuple[str, str]], given: Given) -> Any:
    found = _by_bytes(vocab, merges)
    spaced = bool(given.get("add_prefix_space"))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    return found


def _gpt_neo_x(vocab: dict[str, int], merges: list[tuple[str, str]], given: Given) -> Any:
    found = _gpt_2(vocab, merges, given)
    found.normalizer = normalizers.NFC()
    return found


def _cohere(vocab: dict[str, int], merges: list[tuple[str, str]], given: Given) -> Any:
    found = _gpt_neo_x(vocab, merges, given)
    digits = pre_tokenizers.Digits(individual_digits=True)
    found.pre_tokenizer = pre_tokenizers.Sequence([digits, found.pre_tokenizer])
    return found


def _by_bytes(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    model = models.BPE(
        vocab=vocab,
        merges=merges,
        continuing_subword_prefix="",
        end_of_word_suffix="",
        fuse_unk=False,
    )
    found = tokenizers.Tokenizer(model)
    found.decoder = decoders.ByteLevel()
    return found


AS_IT_IS: Final = TokenizerClass()
_PIECES: Final = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_FILL: Final = ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>", "<FILL_ME>")
_BYTES: Final = {"unk_token": _END, "bos_token": _END, "eos_token": _END}
CLASSES: Final[Mapping[str, TokenizerClass]] = {
    **dict.fromkeys(
        ("TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"), AS_IT_IS
    ),
    "LlamaTokenizer": TokenizerClass(_llama, _PIECES),
    "CodeLlamaTokenizer": TokenizerClass(_code_llama, _PIECES, _FILL, around="begin"),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "Qwen2Tokenizer": TokenizerClass(
        _qwen_2, {"unk_token": _END, "eos_token": _END, "pad_token": _END}, adds_last=True
    ),
    "GPT2Tokenizer": TokenizerClass(_gpt_2, _BYTES),
    "CohereTokenizer": TokenizerClass(
        _cohere,
        {
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        _gpt_neo_x, {**_BYTES, "pad_token": "<|padding|>"}, around="nothing"
    ),
}
"""Classes by name, without `Fast`."""
_OTHERS: Final = _words(
    "Albert Bart Barthez Bartpho Basic BertGeneration BertJapanese Bert Bertweet BigBird BioGpt"
    " BlenderbotSmall Blenderbot ByT5 CLIP CTRL Camembert Canine Character Clvp CodeGen"
    " ConvBert CpmAnt Cpm DPRContextEncoder DPRQuestionEncoder DPRReader Deberta DebertaV2 Dia"
    " DistilBert Esm Esmc FNet FSMT FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3"
    " Herbert LED Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke Lxmert M2M100 MBart50 MBart MLuke MPNet"
    " Marian MarkupLM Mecab Mgpstr MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart Parakeet"
    " Pegasus Perceiver Phobert Pop2Piano ProphetNet Qwen3_5 Rag Reformer RemBert RoCBert RoFormer"
    " Roberta SeamlessM4T Siglip2 Siglip Speech2Text SpeechT5 Splinter SqueezeBert T5 Tapas Tipsv2"
    " Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper Wordpiece XGLM XLMRoberta XLM"
    " XLNet"
)
"""Classes of transformers that none of our families has."""
_BY_MODEL: Final = {
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    "cohere2": "CohereTokenizer",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(
        ("granite", "mistral", "mixtral", "olmo2", "olmo3", "phi3"), "TokenizersBackend"
    ),
    **dict.fromkeys(("mistral3", "ministral3", "glm4", "glm4_moe"), "TokenizersBackend"),
    **dict.fromkeys(("glm4v", "glm4v_moe", "ernie4_5_moe", "minimax_m2"), "TokenizersBackend"),
}
"""What transformers expects of a model type."""
_WRONGLY_NAMED: Final = frozenset(("qwen2", "phi3", "ernie4_5_moe", "minimax_m2"))
"""Model types whose checkpoints are known to name a wrong class."""


def class_of(model: Given, config: Given, file: str) -> TokenizerClass:
    """The class with which transformers reads a folder.

    Args:
        model: its `config.json`.
        config: its `tokenizer_config.json`.
        file: the text of its `tokenizer.json`.

    Raises:
        TokenizerError: it is none that we know.
    """
    kind = model.get("model_type")
    stated = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = stated.removesuffix("Fast") if isinstance(stated, str) else ""
    expected = _BY_MODEL.get(kind) if isinstance(kind, str) else None
    if not name:
        return CLASSES[expected or "TokenizersBackend"]
    own_code = config.get("auto_map")
    if isinstance(own_code, dict):
        own_code = own_code.get("AutoTokenizer")
    if not own_code:
        # It would split texts at spaces. Llama 3's checkpoints name it and have bytes.
        is_wrong = name == "LlamaTokenizer" and '"ByteLevel"' in file
        if expected == "TokenizersBackend" or (is_wrong and kind not in _WRONGLY_NAMED):
            return AS_IT_IS
        if expected is not None and kind in _WRONGLY_NAMED:
            name = expected
    elif expected is None and name not in CLASSES:
        raise TokenizerError(
            f"the tokenizer's class {stated} has code of its own, which is not run"
        )
    if name in _OTHERS:
        raise TokenizerError(f"tokenizers of the class {stated} are not supported")
    return CLASSES.get(name, AS_IT_IS)


def rebuilt(build: Build, file: Mapping[str, Any], given: Given) -> tokenizers.Tokenizer:
    """A tokenizer of the vocabulary and the merges of a file.

    Raises:
        TokenizerError: the file has another kind of vocabulary.
    """
    model = file.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vocab, dict):
        raise TokenizerError("tokenizer.json is no BPE, which the tokenizer's class needs")
    merges = [
        tuple(one.split(" ")) if isinstance(one, str) else tuple(one)
        for one in model.get("merges") or ()
    ]
    return build(vocab, cast("list[tuple[str, str]]", merges), given)
