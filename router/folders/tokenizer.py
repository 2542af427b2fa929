"""Reads the tokenizer of a model folder as transformers 5.24 does.

1. The class (`router.folders.classes`) says whether `tokenizer.json` counts as it is.
2. Special tokens come from `tokenizer_config.json`. If that does not list the added tokens, those
   of `special_tokens_map.json`, `added_tokens.json` and `tokenizer.json` count, in this order.
3. All of them are added to the tokenizer, which gives new ones the next ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import tokenizers
from tokenizers import AddedToken, processors

from router.folders.classes import TokenizerClass, TokenizerError, class_of, rebuilt, text_of

FILE: Final = "tokenizer.json"
_NAMED: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens that every tokenizer may have."""
_EXTRA: Final = ("extra_special_tokens", "additional_special_tokens")
_CLEANS_BPE: Final = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_SPLITS_MISTRAL: Final = 5
"""The release of transformers that writes a right way to split texts for Mistral's models."""
Token = str | AddedToken


class FolderTokenizer(NamedTuple):
    """What a folder says of its tokenizer."""

    backend: tokenizers.Tokenizer
    special: dict[str, str]
    """Texts of special tokens by name, such as `eos_token`."""
    config: dict[str, Any]
    """Its `tokenizer_config.json`."""


def read_tokenizer(folder: Path) -> FolderTokenizer:
    """Reads a folder with a `tokenizer.json`.

    Raises:
        TokenizerError: transformers would read it otherwise, or not at all.
        Exception: a file is damaged.
    """
    text = (folder / FILE).read_text(encoding="utf-8")
    config = read_json(folder / "tokenizer_config.json")
    model = read_json(folder / "config.json")
    kind = class_of(model, config, text)
    _check_options(model, config)
    given = {**config}
    tokens = _Tokens(folder, given, kind)
    if kind.build is None:
        backend = tokenizers.Tokenizer.from_str(text)
    else:
        file = tokens.file
        backend = rebuilt(kind.build, file, {**kind.special, **given})
        if kind.around == "as the file says" and file.get("post_processor"):
            backend.post_processor = _post_processor(file)
    if _cleans(given, is_bpe=isinstance(backend.model, tokenizers.models.BPE)):
        raise TokenizerError("clean_up_tokenization_spaces is not supported for this tokenizer")
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(given.get("split_special_tokens"))
    tokens.add_to(backend)
    if kind.around == "begin" and (begin := tokens.texts().get("bos_token")):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))]
        )
    return FolderTokenizer(backend, tokens.texts(), config)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no file."""
    if not path.is_file():
        return {}
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))


class _Tokens:
    """The special and added tokens of a folder."""

    def __init__(self, folder: Path, given: dict[str, Any], kind: TokenizerClass) -> None:
        self._folder = folder
        self._kind = kind
        self._given = given
        self._added: dict[int, AddedToken] = {}
        self._file: dict[str, Any] | None = None
        if not given.get("extra_special_tokens"):
            given["extra_special_tokens"] = given.get("additional_special_tokens")
        if "added_tokens_decoder" in given:
            for index, token in given["added_tokens_decoder"].items():
                self._added[int(index)] = _added_token(token)
        else:
            self._read_old_files()
        by_text = {token.content: token for token in self._added.values()}
        self._named: dict[str, Token] = {}
        for name, value in ({**kind.special, **given}).items():
            if not name.endswith("_token") or not isinstance(value, str | dict | AddedToken):
                continue
            token = _token(value)
            listed = by_text.get(text_of(token)) if name in _NAMED and name in given else None
            self._named[name] = listed or token
        extra = given.get("extra_special_tokens")
        if isinstance(extra, dict):
            self._named |= {name: _token(value) for name, value in extra.items()}
            extra = None
        self._extra = [*map(_token, extra or ()), *kind.extra]

    @property
    def file(self) -> dict[str, Any]:
        """`tokenizer.json`, read once."""
        if self._file is None:
            self._file = read_json(self._folder / FILE)
        return self._file

    def texts(self) -> dict[str, str]:
        """Special tokens by name."""
        return {name: text_of(token) for name, token in self._named.items()}

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Adds them all. Those that a tokenizer has get these properties."""
        adding: list[Token] = [self._added[index] for index in sorted(self._added)]
        there = {one.content for one in backend.get_added_tokens_decoder().values()}
        there.update(text_of(one) for one in adding)
        for token in (*self._named.values(), *self._extra):
            if text_of(token) not in there:
                there.add(text_of(token))
                adding.append(token)
        names = set(self.texts().values())
        for at, token in enumerate(adding):
            if isinstance(token, str):
                adding[at] = AddedToken(token, special=True)
            elif token.content in names:
                token.special = True
        backend.add_tokens(adding)
        if self._kind.adds_last:
            every = dict.fromkeys(text_of(one) for one in (*self._named.values(), *self._extra))
            backend.add_tokens([AddedToken(text, special=True) for text in every])

    def _read_old_files(self) -> None:
        """Files of older releases, which list what `added_tokens_decoder` lists today."""
        given = self._given
        for name, value in read_json(self._folder / "special_tokens_map.json").items():
            if name == "extra_special_tokens" and isinstance(value, list):
                value = [*(given.get(name) or ()), *value]
            given[name] = (
                _special(value) if isinstance(value, dict) and name not in _EXTRA else value
            )
        if not given.get("extra_special_tokens"):
            given["extra_special_tokens"] = given.get("additional_special_tokens")
        special = {text_of(given[name]) for name in _NAMED if given.get(name)}
        extra = given.get("extra_special_tokens")
        special.update(text_of(one) for one in (extra if isinstance(extra, list) else ()))
        for text, index in read_json(self._folder / "added_tokens.json").items():
            known = text in special
            self._added[index] = AddedToken(text, normalized=not known, special=known)
        for token in self.file.get("added_tokens") or ():
            self._added[token["id"]] = _added_token(
                {name: value for name, value in token.items() if name != "id"}
            )


def _token(value: Any) -> Token:
    """A special token as a config states it.

    Raises:
        TokenizerError: it states none.
    """
    if isinstance(value, str | AddedToken):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return _added_token(value)
    raise TokenizerError("a special token of the tokenizer is neither a text nor an object")


def _special(value: Mapping[str, Any]) -> AddedToken:
    return _added_token({**value, "special": True})


def _added_token(value: Any) -> AddedToken:
    if isinstance(value, AddedToken):
        return value
    try:
        return AddedToken(**{name: one for name, one in value.items() if name != "__type"})
    except (TypeError, AttributeError):
        raise TokenizerError("an added token of the tokenizer cannot be read") from None


def _post_processor(file: Mapping[str, Any]) -> Any:
    """The post-processor of a file, without reading its vocabulary again."""
    small = {"type": "BPE", "vocab": {}, "merges": []}
    parts = {**file, "model": small, "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    return tokenizers.Tokenizer.from_str(json.dumps(parts)).post_processor


def _cleans(given: Mapping[str, Any], *, is_bpe: bool) -> bool:
    """Whether spaces are cut from decoded texts: that would change text which a client has got."""
    return bool(given.get("clean_up_tokenization_spaces")) and bool(
        not is_bpe or given.get(_CLEANS_BPE)
    )


def _check_options(model: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuses options by which transformers takes another file, or another way to split texts.

    Raises:
        TokenizerError: there is one.
    """
    others = [one for one in config.get("fast_tokenizer_files") or () if one != FILE]
    if others:
        raise TokenizerError("fast_tokenizer_files names another file than tokenizer.json")
    release = str(model.get("transformers_version") or "0").partition(".")[0]
    is_old = not release.isdecimal() or int(release) < _SPLITS_MISTRAL
    if config.get("fix_mistral_regex") and is_old and model.get("model_type") in (None, "mistral"):
        raise TokenizerError("fix_mistral_regex is not supported")
