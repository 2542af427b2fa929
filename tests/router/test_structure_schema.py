"""Schemas: what cannot be enforced is named by its pointer, and no value is ever shown."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tiny_tokenizers import SPECIAL, file_of
from tokenizers import Tokenizer

from baton.inference.v1 import inference_pb2 as api
from router.structure.grammar import Grammar
from router.structure.schema import MAX_SCHEMA_BYTES, SchemaError, prepare, read

SECRET = "hunter2"
UNSUPPORTED: list[tuple[dict[str, Any], list[str]]] = [
    ({"not": {"const": SECRET}}, ["/not"]),
    ({"type": "object", "dependentRequired": {SECRET: ["b"]}, "if": {}, "then": {}},
     ["/dependentRequired", "/if", "/then"]),
    ({"type": "string", "format": SECRET}, ["/format"]),
    ({"properties": {"a/b": {"items": {"uniqueItems": True}}}},
     ["/properties/a~1b/items/uniqueItems"]),
    ({"anyOf": [{"type": "string"}, {"type": "array", "contains": {}}]}, ["/anyOf/1/contains"]),
    ({"type": "string", "pattern": f"(?={SECRET})x"}, ["/pattern"]),
    ({"$defs": {"größe a": {"not": {}}}, "$ref": "#/$defs/größe a"}, ["/$defs/größe a/not"]),
    ({"$defs": {"d": {"propertyNames": {"pattern": "a"}}}, "$ref": "#/$defs/d"},
     ["/$defs/d/propertyNames"]),
    ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
                     "b": {"oneOf": [{"type": "integer"}, {"type": "string"}]}}},
     ["/properties/a/oneOf"]),
]  # fmt: skip
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"type": SECRET}, "/type"),
    ({"properties": {"a": {"type": "array", "items": {"type": 3}}}}, "/properties/a/items/type"),
    ({"properties": [SECRET]}, "/properties"),
    ({"$ref": "#/nope"}, "/$ref is no such schema"),
    ({"properties": {"a": {"$ref": f"https://{SECRET}/x"}}}, "/properties/a/$ref is a remote"),
    ({"type": "integer", "minimum": 3, "maximum": 1}, "no schema that can be enforced"),
    ({"$ref": "#/$defs/a b"}, "/$ref is no such schema"),
]


@pytest.mark.parametrize(("schema", "pointers"), UNSUPPORTED)
def test_what_cannot_be_enforced_is_refused_or_dropped(
    schema: dict[str, Any], pointers: list[str]
) -> None:
    text = json.dumps(schema)
    with pytest.raises(SchemaError) as caught:
        prepare(read(text), strict=True)
    assert sorted(caught.value.pointers) == sorted(pointers)
    assert all(pointer in caught.value.rule for pointer in pointers)
    assert SECRET not in caught.value.rule
    prepared = prepare(read(text), strict=False)
    assert sorted(prepared.dropped) == sorted(pointers)
    assert prepared.coerce_one_of == any("oneOf" in pointer for pointer in pointers)


@pytest.mark.parametrize(("schema", "rule"), IMPOSSIBLE)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_no_schema_is_refused(schema: dict[str, Any], rule: str, strict: bool) -> None:
    with pytest.raises(SchemaError) as caught:
        prepare(read(json.dumps(schema)), strict=strict)
    assert rule in caught.value.rule
    assert SECRET not in caught.value.rule


A = {"properties": {"a": {"type": "integer"}}}
B = {"properties": {"b": {"type": "integer"}}}
CLOSED: list[tuple[dict[str, Any], str]] = [
    (A, ""),
    ({"type": ["object", "null"]}, ""),
    ({"items": {"anyOf": [A, B]}}, "/items/anyOf/1"),
    ({"$defs": {"d": A}, "allOf": [{"$ref": "#/$defs/d"}, {"description": "x"}]}, "/$defs/d"),
    ({**A, "anyOf": [{"required": ["a"]}, {"properties": {"a": {"const": 1}}}]}, ""),
    ({"patternProperties": {"^x": A}}, "/patternProperties/^x"),
    ({"type": "object", "additionalProperties": A}, "/additionalProperties"),
]
OPEN: list[tuple[dict[str, Any], str]] = [
    ({**A, "additionalProperties": True}, "/additionalProperties must be false"),
    ({"items": {**A, "additionalProperties": {}}}, "/items/additionalProperties must be false"),
    ({"allOf": [A, B]}, "/additionalProperties must be false"),
    ({**A, "anyOf": [B]}, "/additionalProperties must be false"),
    ({**A, "$ref": "#/$defs/d", "$defs": {"d": B}}, "/additionalProperties must be false"),
]


@pytest.mark.parametrize(("schema", "pointer"), CLOSED)
def test_strict_objects_are_closed(schema: dict[str, Any], pointer: str) -> None:
    found: Any = prepare(read(json.dumps(schema)), strict=True).schema
    for name in filter(None, pointer.split("/")):
        found = found[int(name) if name.isdecimal() else name]
    assert found["additionalProperties"] is False
    assert prepare(read(json.dumps(schema)), strict=False).schema == schema, "others stay open"


@pytest.mark.parametrize(("schema", "rule"), OPEN)
def test_strict_objects_that_cannot_be_closed_are_refused(
    schema: dict[str, Any], rule: str
) -> None:
    with pytest.raises(SchemaError, match=rule):
        prepare(read(json.dumps(schema)), strict=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": NaN}', "[" * 100_000, '"a"'])
def test_what_is_no_json_object(text: str) -> None:
    with pytest.raises(SchemaError, match="must be a JSON schema"):
        read(text)


def test_the_clients_own_options_for_llguidance_do_not_count() -> None:
    schema = {"type": "object", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(SchemaError):
        prepare(schema, strict=True)
    assert "x-guidance" not in prepare({**schema}, strict=False).schema


@pytest.mark.parametrize(
    "pattern", ["^a$", "^(a)$", "^(?:a|b c)$", r"^x\.y$", "^(a|z)$", "^a", "a"]
)
def test_a_pattern_that_names_properties_alone_leads_into_no_dead_end(pattern: str) -> None:
    """Behind the property a comma was allowed, and no name behind it."""
    names = ["a", "b c", "x.y"]
    schema = {
        "type": "object",
        "properties": {key: {"type": "integer"} for key in names},
        "patternProperties": {pattern: {"maximum": 5, "minimum": 1}},
        "additionalProperties": False,
    }
    grammar = Grammar({})
    grammar.structure(api.Structure(json_schema=api.JsonSchema(schema=json.dumps(schema))))
    tokenizer = Tokenizer.from_str(file_of("bytes"))
    matcher = LLMatcher(LLTokenizer(file_of("bytes")), grammar.text(), log_level=0)
    for text in ("{", *(f'"{name}": 3, ' for name in names)):
        ids = tokenizer.encode(text.rstrip(", "), add_special_tokens=False).ids
        assert matcher.try_consume_tokens(ids) == len(ids)
        mask = np.frombuffer(matcher.deep_copy().compute_bitmask(), np.uint8)
        comma = tokenizer.token_to_id(",")
        may_go_on = bool(np.unpackbits(mask, bitorder="little")[comma]) if text != "{" else False
        if may_go_on:
            assert matcher.try_consume_tokens([comma]) == 1
            for space in (" ", ""):
                rest = matcher.deep_copy()
                rest.try_consume_tokens(tokenizer.encode(space, add_special_tokens=False).ids)
                rest.compute_bitmask()
                assert not rest.is_error(), "after a comma comes a name"


def test_the_order_of_properties_is_kept() -> None:
    text = '{"properties": {"z": {}, "a": {}, "m": {"not": {}}}}'
    assert list(prepare(read(text), strict=False).schema["properties"]) == ["z", "a", "m"]


def matcher_of(schema: dict[str, Any]) -> LLMatcher:
    grammar = Grammar({})
    asked = api.JsonSchema(schema=json.dumps(schema), strict=True)
    grammar.structure(api.Structure(json_schema=asked))
    return LLMatcher(LLTokenizer(file_of("bytes")), grammar.text(), log_level=0)


BYTES = Tokenizer.from_str(file_of("bytes"))


def takes(matcher: LLMatcher, text: str) -> bool:
    follower = matcher.deep_copy()
    ids = BYTES.encode(text, add_special_tokens=False).ids
    return follower.try_consume_tokens(ids) == len(ids) and follower.is_accepting()


BIG = 2**53 + 1
BEYOND: list[tuple[dict[str, Any], str]] = [
    ({"const": BIG}, "/const"),
    ({"enum": [1, {"a": [-BIG]}]}, "/enum"),
    ({"properties": {"a": {"const": 2**63}}}, "/properties/a/const"),
    ({"const": 1 - 2**63}, "/const"),
    ({"const": 10**400}, "/const"),
    ({"type": "integer", "minimum": 2**70}, "/minimum"),
    ({"type": "integer", "exclusiveMinimum": 1e30}, "/exclusiveMinimum"),
    ({"type": "number", "maximum": -(2**63)}, "/maximum"),
]


@pytest.mark.parametrize(("schema", "pointer"), BEYOND)
def test_numbers_that_would_become_others_cannot_be_enforced(
    schema: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(SchemaError, match="cannot be enforced, as strict asks") as caught:
        prepare(read(json.dumps(schema)), strict=True)
    assert caught.value.pointers == [pointer]
    assert prepare(read(json.dumps(schema)), strict=False).dropped == [pointer]


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**62, 0, -1, True, 1.5])
def test_numbers_that_stay_are_enforced(value: float) -> None:
    matcher = matcher_of({"enum": [value, "x"]})
    assert takes(matcher, json.dumps(value))
    assert not takes(matcher, json.dumps(value + 2))


@pytest.mark.parametrize("bound", [BIG, -BIG])
def test_bounds_never_allow_what_is_outside(bound: int) -> None:
    for name, sign, own in (
        ("minimum", 1, 0),
        ("exclusiveMinimum", 1, 1),
        ("maximum", -1, 0),
        ("exclusiveMaximum", -1, 1),
    ):
        matcher = matcher_of({"type": "integer", name: bound})
        inside = [at for at in range(-6, 7) if takes(matcher, str(bound + sign * at))]
        assert inside, name
        assert min(inside) >= own, name


LEAST = 1024 - 2**63


@pytest.mark.parametrize("type_", ["integer", ["integer", "null"]])
@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, (LEAST, 2**63 - 1), (-(2**63) - 1, 2**63)),
        ({"minimum": -1e300}, (LEAST, 7, 2**63 - 1), (LEAST - 1,)),
        ({"exclusiveMinimum": -(2**63) - 1}, (LEAST + 1, 0), (-(2**63) - 1,)),
        ({"exclusiveMaximum": 2**63 - 1}, (0, 2**63 - 1026), (2**63 - 1,)),
    ],
)
def test_integers_of_64_bits_are_enforced(
    type_: Any, bounds: dict[str, Any], inside: tuple[int, ...], outside: tuple[int, ...]
) -> None:
    matcher = matcher_of({"type": type_, **bounds})
    assert [takes(matcher, str(value)) for value in inside] == [True] * len(inside)
    assert not any(takes(matcher, str(value)) for value in outside)


def wide(count: int) -> dict[str, Any]:
    """Schema of many alternatives, each an object of its own."""
    return {
        "anyOf": [
            {"type": "object", "properties": {f"p{i}": {"not": {}, "description": "x" * 250}}}
            for i in range(count)
        ]
    }


def test_large_schemas_take_milliseconds_and_larger_ones_none() -> None:
    text = json.dumps(wide(800))
    assert 0.9 * MAX_SCHEMA_BYTES < len(text) <= MAX_SCHEMA_BYTES
    began_s = time.perf_counter()
    assert len(prepare(read(text), strict=False).dropped) == 800
    assert time.perf_counter() - began_s < 5.0
    with pytest.raises(SchemaError, match="at most"):
        read(json.dumps(wide(9_000)))


def test_many_faults_end_soon() -> None:
    """Each is found by checking parts alone, and that is bounded."""
    bad = {"type": "string", "pattern": "(?=x)"}
    schema = {"type": "object", "properties": {f"p{i}": bad for i in range(2_000)}}
    began_s = time.perf_counter()
    with pytest.raises(SchemaError):
        prepare(read(json.dumps(schema)), strict=False)
    assert time.perf_counter() - began_s < 20.0


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"choice": api.Choices(texts=["a <|im_end|>b"])}, "a <|im_end|>b"),
        ({"regex": r"<\|im_end\|>x"}, "<|im_end|>x"),
        ({"lark": 'start: "<s>" "</s>"'}, "<s></s>"),
        ({"json_schema": api.JsonSchema(schema='{"const": "<s>"}')}, '"<s>"'),
        ({"json_schema": api.JsonSchema(schema=r'{"const": "\u003cs>"}')}, '"<s>"'),
    ],
)
def test_a_literal_that_is_spelled_like_a_special_token_is_text(
    form: dict[str, Any], text: str, kind: str
) -> None:
    special = {name: index for index, name in enumerate(SPECIAL)}
    grammar = Grammar(special)
    grammar.structure(api.Structure(**form))
    tokenizer = Tokenizer.from_str(file_of(kind))
    size = tokenizer.get_vocab_size()
    matcher = LLMatcher(LLTokenizer(file_of(kind), size, [2]), grammar.text())
    drawn: list[int] = []
    while not matcher.is_stopped() and len(drawn) < 40:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:size])
        drawn.append(int(allowed[-1]))
        assert matcher.consume_token(drawn[-1])
    assert tokenizer.decode(drawn) == text
