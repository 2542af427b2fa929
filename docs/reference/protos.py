"""Writes `api.md` from the proto for clients and its comments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from reference import GENERATED, table

PROTOS = Path(__file__).resolve().parents[2] / "protos"
SOURCE = PROTOS / "baton" / "inference" / "v1" / "inference.proto"
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"

INTRODUCTION = """\
# API for clients

Clients speak this API to a router over gRPC. [Clients](clients.md) has examples in several
languages, and [errors](errors.md) lists the errors. Over HTTP the router speaks OpenAI's API on the
paths `/v1/models`, `/v1/completions` and `/v1/chat/completions`, and the APIs of agents on
`/v1/responses` and `/v1/messages` ([Responses and Messages](agents.md)). It also has `/tokenize`,
`/detokenize` and `/tokenizer_info`, as vLLM's server does.
"""

Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in Field.Type.items()}


def page() -> str:
    """Writes the page."""
    file = _described()
    comments = {
        tuple(location.path): " ".join(location.leading_comments.split())
        for location in file.source_code_info.location
        if location.leading_comments
    }
    parts = [INTRODUCTION, GENERATED + "\n"]
    for index, service in enumerate(file.service):
        parts += _service(service, (6, index), comments)
    for index, message in enumerate(file.message_type):
        parts += _message(message, (4, index), comments)
    for index, enum in enumerate(file.enum_type):
        rows = [
            (f"`{value.name}`", str(value.number), comments.get((5, index, 2, at), ""))
            for at, value in enumerate(enum.value)
        ]
        parts.append(f"## {enum.name}\n\n{comments[5, index]}\n")
        parts.append(table(("value", "number", "meaning"), *rows))
    return "\n".join(parts)


def _described() -> descriptor_pb2.FileDescriptorProto:
    """Reads the proto, with its comments."""
    with tempfile.NamedTemporaryFile() as out:
        arguments = ["protoc", f"-I{PROTOS}", f"-I{WELL_KNOWN}", "--include_source_info"]
        failed = protoc.main([*arguments, f"--descriptor_set_out={out.name}", str(SOURCE)])
        assert not failed, f"protoc: {SOURCE}"
        return descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes()).file[0]


def _service(service: Any, path: tuple[int, ...], comments: dict[Any, str]) -> Iterator[str]:
    yield f"## {service.name}\n\n{comments[path]}\n"
    rows = [
        (
            f"`{method.name}`",
            _stream(method.client_streaming) + _link(method.input_type),
            _stream(method.server_streaming) + _link(method.output_type),
            comments[(*path, 2, index)],
        )
        for index, method in enumerate(service.method)
    ]
    yield table(("method", "request", "response", "what it does"), *rows)


def _stream(streaming: bool) -> str:
    return "stream of " if streaming else ""


def _message(message: Any, path: tuple[int, ...], comments: dict[Any, str]) -> Iterator[str]:
    yield f"## {message.name}\n\n{comments[path]}\n"
    oneofs = [
        f"`{oneof.name}`: {comments.get((*path, 8, index), '')}"
        for index, oneof in enumerate(message.oneof_decl)
        if not oneof.name.startswith("_")
    ]
    if oneofs:
        yield "\n\n".join(oneofs) + "\n"
    rows = [
        (f"`{field.name}`", str(field.number), _type(field, message), comments[(*path, 2, index)])
        for index, field in enumerate(message.field)
    ]
    if rows:
        yield table(("field", "number", "type", "meaning"), *rows)


def _type(field: Any, message: Any) -> str:
    """The type of a field as in the proto, with links. A field of a oneof names the oneof."""
    for entry in message.nested_type:
        if entry.options.map_entry and field.type_name.endswith(f".{entry.name}"):
            key, value = (SCALARS[part.type] for part in entry.field)
            return f"map of {key} to {value}"
    name = _link(field.type_name) if field.type_name else SCALARS[field.type]
    if field.label == Field.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, in `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _link(type_name: str) -> str:
    """Links to the type's heading on the page. Google's types have no link."""
    name = type_name.rpartition(".")[2]
    return (
        f"`{type_name[1:]}`" if type_name.startswith(".google.") else f"[{name}](#{name.lower()})"
    )
