"""Many schemas, at a temperature at which a model says anything: what ends is an instance."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis_jsonschema
import jsonschema
import pytest
from engine_kit import finish, running, submit
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tiny_models import write_tiny_model
from tokenizers import Tokenizer

from baton.inference.v1 import inference_pb2 as api
from engine.engine import Engine
from engine.types import EndReason, SamplingParams
from router.structure.grammar import Grammar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

VOCAB = 49152
END = 2
PROMPT = [401, 1200, 33, 17, 9000, 52, 77]
FORMATS = {
    "date": st.dates().map(str),
    "uuid": st.uuids().map(str),
    "ipv4": st.ip_addresses(v=4).map(str),
    "time": st.times().map(lambda time: f"{time:%H:%M:%S}Z"),
}
NAMES = st.sampled_from(["a", "name", "Größe", "x y", "list", "z9"])
LEAVES = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(1, 12)),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-500, 500),
        st.integers(0, 500),
    ),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "string", "pattern": "^[a-c]{2,5}-[0-9]{3}$"}),
    st.sampled_from(sorted(FORMATS)).map(lambda name: {"type": "string", "format": name}),
    st.lists(st.sampled_from(["red", 'a "b"', 3, None, True, 1.5]), min_size=1, unique=True).map(
        lambda values: {"enum": values}
    ),
)


def _inner(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(NAMES, schemas, min_size=1, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:2],
            "additionalProperties": False,
        }
    )
    lists = st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most},
        schemas,
        st.integers(0, 3),
    )
    either = st.lists(schemas, min_size=2, max_size=3).map(lambda found: {"anyOf": found})
    return objects | lists | either


SCHEMAS = st.recursive(LEAVES, _inner, max_leaves=5)
"""Bounded strings and lists, so that a text of any draws ends soon."""


def drawn(count: int) -> list[dict[str, Any]]:
    """So many schemas, the same ones every time."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(SCHEMAS)
    def draw(schema: dict[str, Any]) -> None:
        found.append(schema)

    draw()
    return found[:count]


def grammar_of(**form: Any) -> str:
    grammar = Grammar({})
    grammar.structure(api.Structure(**form))
    assert not grammar.dropped
    return grammar.text()


def of_schema(schema: dict[str, Any]) -> str:
    return grammar_of(json_schema=api.JsonSchema(schema=json.dumps(schema), strict=True))


def is_instance(schema: dict[str, Any]) -> Callable[[str], bool]:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return lambda text: validator.is_valid(json.loads(text))


@pytest.fixture(scope="module")
def random_engine(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Random weights with a real tokenizer."""
    folder = write_tiny_model(tmp_path_factory.mktemp("m"), vocab=VOCAB, tokenizer=False)
    shutil.copy(demo_model / "tokenizer.json", folder)
    with running(folder, num_pages=400) as engine:
        yield engine


def ended(engine: Engine, demo_model: Path, wanted: list[tuple[str, Callable[[str], bool]]]) -> int:
    """How many of these end within 96 tokens. Each that does must be what it claims."""
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    count = 0
    for start in range(0, len(wanted), 16):
        part = wanted[start : start + 16]
        runs = [
            submit(
                engine,
                PROMPT,
                96,
                sampling=SamplingParams(temperature=1.5, seed=start + i, grammar=grammar),
            )
            for i, (grammar, _) in enumerate(part)
        ]
        finish(*runs, timeout_s=120.0)
        for run, (_, is_right) in zip(runs, part, strict=True):
            if run.ends[0].reason is EndReason.END_OF_SEQUENCE:
                count += 1
                text = tokenizer.decode(run.tokens[0])
                assert is_right(text), text
    return count


def test_instances_of_300_schemas(random_engine: Engine, demo_model: Path) -> None:
    schemas = drawn(300)
    assert len(schemas) == 300
    wanted = [(of_schema(schema), is_instance(schema)) for schema in schemas]
    found = ended(random_engine, demo_model, wanted)
    print(f"{found} of 300 ended within 96 tokens")
    assert found >= 250


def test_other_forms(random_engine: Engine, demo_model: Path) -> None:
    patterns = [r"[a-f]{2,9}", r"(\d{3}-){1,3}x", r"ä|ö|[^a-z]{3}", r"\w+@\w{2,5}\.(com|org)"]
    wanted = [
        (grammar_of(regex=pattern), lambda text, p=pattern: bool(re.fullmatch(p, text)))
        for pattern in patterns
    ] * 5
    texts = ["yes", "no", 'a "quoted" one', "ÄÖÜ", "🎉 party"]
    choice = api.Choices(texts=texts)
    wanted += [(grammar_of(choice=choice), lambda text: text in texts)] * 10
    lark = 'start: "(" WORD ("," WORD)* ")"\nWORD: /[a-z]{1,4}/'
    gbnf = 'root ::= "(" word ("," word)* ")"\nword ::= [a-z] [a-z]? [a-z]? [a-z]?'
    listed = re.compile(r"\([a-z]{1,4}(,[a-z]{1,4})*\)")
    for grammar in (grammar_of(lark=lark), grammar_of(gbnf=gbnf)):
        wanted += [(grammar, lambda text: bool(listed.fullmatch(text)))] * 5
    found = ended(random_engine, demo_model, wanted)
    assert found >= 0.8 * len(wanted)


def test_every_instance_is_accepted(demo_model: Path) -> None:
    """The grammar is not narrower than the schema, but for white space and the order of names."""
    tokenizer = LLTokenizer((demo_model / "tokenizer.json").read_text(), VOCAB, [END])
    assert sum(accepted(tokenizer, schema) for schema in drawn(60)) > 200


def accepted(tokenizer: LLTokenizer, schema: dict[str, Any]) -> int:
    """How many instances were tried. Each must be accepted."""
    compiled, tried = LLMatcher(tokenizer, of_schema(schema), log_level=0), []

    @settings(
        max_examples=8,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(instances(schema))
    def check(instance: Any) -> None:
        matcher = compiled.deep_copy()
        text = json.dumps(instance, ensure_ascii=False)
        ids = tokenizer.tokenize_str(text)
        if tokenizer.decode_str(ids) != text:
            return  # Some bytes are no token of this model.
        assert matcher.try_consume_tokens(ids) == len(ids), (schema, text)
        assert matcher.is_accepting(), (schema, text)
        tried.append(text)

    check()
    return len(tried)


def instances(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Instances, with the properties of objects in the schema's order, in which they are written.
    hypothesis-jsonschema makes the leaves; its objects do not work with hypothesis 6.170."""
    if "anyOf" in schema:
        return st.one_of([instances(one) for one in schema["anyOf"]])
    if schema.get("type") == "array":
        return st.lists(instances(schema["items"]), max_size=schema["maxItems"])
    if "format" in schema:
        return FORMATS[schema["format"]]
    if schema.get("type") != "object":
        return hypothesis_jsonschema.from_schema(schema)
    required = schema["required"]
    parts = {name: instances(one) for name, one in schema["properties"].items()}
    whole = st.fixed_dictionaries(
        {name: one for name, one in parts.items() if name in required},
        optional={name: one for name, one in parts.items() if name not in required},
    )
    return whole.map(lambda found: {name: found[name] for name in parts if name in found})
