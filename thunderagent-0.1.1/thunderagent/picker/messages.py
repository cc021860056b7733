"""The used parts of the messages of Envoy's external processing and of gRPC's health checks.

Descriptors are built at import, in a pool of their own: no generated file, no compiler, and no collision with other
copies of the same messages. The wire format uses numbers, so names of messages are free. A map is a list of entries
there, and is read as one. Protobuf skips unknown fields.

Source: envoy/service/ext_proc/v3/external_processor.proto and envoy/config/core/v3/base.proto of Envoy 1.40,
google/protobuf/struct.proto, grpc/health/v1/health.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE = "grpc.health.v1.Health"
SERVING, NOT_SERVING = 1, 2
OVERWRITE = 2
"""A header that is set replaces those of its name."""

ENDPOINT = "x-gateway-destination-endpoint"
"""Where a request goes; the next two are who served it, and the allowed endpoints."""

SERVED = f"{ENDPOINT}-served"
SUBSET = f"{ENDPOINT}-subset"
METADATA, SUBSET_METADATA = "envoy.lb", "envoy.lb.subset_hint"

CHUNK_BYTES = 62_000
"""Size of a body's part in one message: Envoy refuses more than 64 KB of it in its default buffers."""

SCHEMA = """
HeaderValue: key 1 string, raw_value 3 bytes, value 2 string
HeaderMap: headers 1 HeaderValue*
HeaderValueOption: header 1 HeaderValue, append_action 3 int32
HeaderMutation: set_headers 1 HeaderValueOption*, remove_headers 2 string*
Value: string_value 3 string, struct_value 5 Struct, list_value 6 ListValue
ListValue: values 1 Value*
Field: key 1 string, value 2 Value
Struct: fields 1 Field*
Namespace: key 1 string, value 2 Struct
Metadata: filter_metadata 1 Namespace*
HttpHeaders: headers 1 HeaderMap, end_of_stream 3 bool
HttpBody: body 1 bytes, end_of_stream 2 bool
HttpTrailers: trailers 1 HeaderMap
StreamedBody: body 1 bytes, end_of_stream 2 bool
BodyMutation: streamed_response 3 StreamedBody
CommonResponse: header_mutation 2 HeaderMutation, body_mutation 3 BodyMutation, clear_route_cache 5 bool
PartResponse: response 1 CommonResponse
TrailersResponse: header_mutation 1 HeaderMutation
HttpStatus: code 1 int32
ImmediateResponse: status 1 HttpStatus, headers 2 HeaderMutation, body 3 bytes, details 5 string
ProcessingRequest: request_headers 2 HttpHeaders, response_headers 3 HttpHeaders, request_body 4 HttpBody, \
response_body 5 HttpBody, request_trailers 6 HttpTrailers, response_trailers 7 HttpTrailers, metadata_context 8 Metadata
ProcessingResponse: request_headers 1 PartResponse, response_headers 2 PartResponse, request_body 3 PartResponse, \
response_body 4 PartResponse, request_trailers 5 TrailersResponse, response_trailers 6 TrailersResponse, \
immediate_response 7 ImmediateResponse, dynamic_metadata 8 Struct
HealthCheckRequest: service 1 string
HealthCheckResponse: status 1 int32
"""

_KINDS = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("string", "bytes", "bool", "int32")
}


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="thunderagent/picker.proto", package="thunderagent", syntax="proto3")
    for line in SCHEMA.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for each in fields.split(", "):
            field_name, number, kind = each.split()
            field = message.field.add(name=field_name, number=int(number))
            many = kind.endswith("*")
            field.label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in _KINDS:
                field.type = _KINDS[kind]
            else:
                field.type, field.type_name = field.TYPE_MESSAGE, f".thunderagent.{kind}"
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_described())


def message_class(name: str) -> Any:
    """Return the class of a message of the schema."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"thunderagent.{name}"))


ProcessingRequest, ProcessingResponse = message_class("ProcessingRequest"), message_class("ProcessingResponse")
HealthCheckRequest, HealthCheckResponse = message_class("HealthCheckRequest"), message_class("HealthCheckResponse")


def headers_of(headers: Any) -> list[tuple[str, str]]:
    """Return headers as received, including pseudo-headers."""
    return [
        (each.key, each.raw_value.decode("utf-8", "surrogateescape") if each.raw_value else each.value)
        for each in headers.headers
    ]


def mutate(mutation: Any, headers: Sequence[tuple[str, str]]) -> None:
    """Set these headers in Envoy."""
    for name, value in headers:
        option = mutation.set_headers.add(append_action=OVERWRITE)
        option.header.key, option.header.raw_value = name.lower(), value.encode("utf-8", "surrogateescape")


def body_parts(kind: str, body: bytes, *, ends: bool) -> Iterator[Any]:
    """Yield the messages that forward a part of a body; nothing for an empty part that does not end it."""
    for start in range(0, len(body), CHUNK_BYTES) or ((0,) if ends else ()):
        message = ProcessingResponse()
        streamed = getattr(message, kind).response.body_mutation.streamed_response
        streamed.body = body[start : start + CHUNK_BYTES]
        streamed.end_of_stream = ends and start + CHUNK_BYTES >= len(body)
        yield message


def texts_in(metadata: Any, namespace: str, key: str) -> list[str] | None:
    """Return the texts of an entry of metadata, from a list or separated by commas; None if there is no such entry."""
    for each in metadata.filter_metadata:
        if each.key == namespace:
            for entry in each.value.fields:
                if entry.key == key:
                    values = [value.string_value for value in entry.value.list_value.values]
                    return values or [part.strip() for part in entry.value.string_value.split(",") if part.strip()]
    return None


def picked(endpoints: Sequence[str], path: str | None = None) -> Any:
    """Return the message that forwards a head to the first of some endpoints, to another `path` if given."""
    message, joined = ProcessingResponse(), ",".join(endpoints)
    response = message.request_headers.response
    response.clear_route_cache = True
    mutate(response.header_mutation, [(ENDPOINT, joined), *([(":path", path)] if path is not None else [])])
    response.header_mutation.remove_headers.append("content-length")
    entry = message.dynamic_metadata.fields.add(key=METADATA).value.struct_value.fields.add(key=ENDPOINT)
    entry.value.string_value = joined
    return message
