"""OTLP/JSON to the protobuf bytes of the same request, so that one scanner serves both encodings.

Protobuf's own JSON parser is no use here: OTLP writes ids in hex (other bytes in base64), asks receivers to ignore unknown
fields, and one bad value must not cost the batch. What cannot be understood is left unset, so that the scanner refuses the
span it belongs to by name. Accepted beyond the specification: snake_case names, enum names, ids in base64 of the right
length, 64-bit integers as numbers.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from functools import cache
from typing import Literal, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from phasewise.collector.wire import Malformed

Signal = Literal["traces", "metrics", "logs"]
_REQUESTS: dict[Signal, type[Message]] = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}
_ID_BYTES = {"trace_id": 16, "span_id": 8, "parent_span_id": 8}
_NO_ID = b"?"  # of no valid length: the scanner refuses the span and says which id it was
_DEPTH = 80  # of messages; protobuf refuses at 100
_SURROGATES = re.compile("[\ud800-\udfff]")
_WHOLE = re.compile(r"-?[0-9]{1,20}")
_INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_FIXED32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_SFIXED64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_FIXED64: (0, (1 << 64) - 1),
}


def json_to_protobuf(body: bytes, signal: Signal) -> bytes:
    """Protobuf bytes of an OTLP/JSON export request. Raises Malformed where it is no JSON object of that shape.

    Invalid UTF-8 and lone surrogates become U+FFFD.
    """
    try:
        document = json.loads(body.decode("utf-8-sig", "replace"))
    except ValueError as error:
        raise Malformed(f"it is not JSON: {str(error)[:120]}") from None
    except RecursionError:
        raise Malformed("its JSON is nested too deep") from None
    if not isinstance(document, dict):
        raise Malformed("its JSON is not an object")
    return object_to_protobuf(document, signal)


def object_to_protobuf(document: dict[str, object], signal: Signal) -> bytes:
    """The same for JSON that was read already."""
    request = _REQUESTS[signal]()
    _fill(request, document, 0)
    data: bytes = request.SerializeToString()
    return data


@cache
def _fields(descriptor: Descriptor) -> dict[str, FieldDescriptor]:
    return {name: field for field in descriptor.fields for name in (field.json_name, field.name)}


def _fill(message: Message, document: dict[str, object], depth: int) -> None:
    known = _fields(cast(Descriptor, message.DESCRIPTOR))
    for name, value in document.items():
        field = known.get(name)
        if field is None or value is None:
            continue
        if field.is_repeated:
            _fill_repeated(message, field, value, depth)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            part = getattr(message, field.name)
            part.SetInParent()
            if isinstance(value, dict) and depth < _DEPTH:
                _fill(part, value, depth + 1)
        else:
            _set_scalar(message, field, value)


def _fill_repeated(message: Message, field: FieldDescriptor, value: object, depth: int) -> None:
    if not isinstance(value, list):
        if depth < 2:  # the groups themselves: nothing in them could be trusted
            raise Malformed(f"{field.json_name} is not a list")
        return
    target = getattr(message, field.name)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        for item in value:
            part = target.add()  # an item that is no object stays empty, and is refused as such
            if isinstance(item, dict) and depth < _DEPTH:
                _fill(part, item, depth + 1)
        return
    for item in value:
        scalar = _scalar(field, item)
        target.append(scalar if scalar is not None else field.default_value or 0)


def _set_scalar(message: Message, field: FieldDescriptor, value: object) -> None:
    scalar = _scalar(field, value)
    if scalar is not None:
        setattr(message, field.name, scalar)
    elif isinstance(message, AnyValue) and field.name == "int_value":  # no whole number: keep what it says
        number = _float(value)
        if number is not None:
            message.double_value = number
        elif isinstance(value, str):
            message.string_value = _text(value)


def _scalar(field: FieldDescriptor, value: object) -> str | bytes | int | float | bool | None:
    """The value as the field's type, None where it is not one."""
    kind = field.type
    if kind == FieldDescriptor.TYPE_STRING:
        return _text(value) if isinstance(value, str) else None
    if kind == FieldDescriptor.TYPE_BYTES:
        length = _ID_BYTES.get(field.name)
        return _base64(value) if length is None else _identifier(value, length)
    if kind == FieldDescriptor.TYPE_BOOL:
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
    if kind == FieldDescriptor.TYPE_ENUM:
        return _enum(field, value)
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        whole = _integer(value)
        return whole if whole is not None and low <= whole <= high else None
    return _float(value)


def _text(value: str) -> str:
    return value if value.isascii() else _SURROGATES.sub("\ufffd", value)


def _identifier(value: object, length: int) -> bytes:
    """An id: hex in any case; base64 of exactly that many bytes is a common mistake and unmistakable. "" is no id."""
    if not isinstance(value, str):
        return _NO_ID
    try:
        found = bytes.fromhex(value)
    except ValueError:
        found = _base64(value) or _NO_ID
        return found if len(found) == length else _NO_ID
    if len(found) == length or not found:
        return found
    # 16 letters of base64 that happen to be hex digits hold 12 bytes: still not an id
    return _NO_ID


def _base64(value: object) -> bytes | None:
    if not isinstance(value, str):
        return None
    try:
        standard = value.replace("-", "+").replace("_", "/")
        return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _enum(field: FieldDescriptor, value: object) -> int | None:
    if isinstance(value, str) and field.enum_type is not None and value in field.enum_type.values_by_name:
        number: int = field.enum_type.values_by_name[value].number
        return number
    whole = _integer(value)
    return whole if whole is not None and -(1 << 31) <= whole < 1 << 31 else None


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        if _WHOLE.fullmatch(value):
            return int(value)
        number = _float(value)  # "5.0" and "1e3" are whole numbers too
        return int(number) if number is not None and number.is_integer() and abs(number) < 1 << 53 else None
    return None


def _float(value: object) -> float | None:
    """Numbers, their texts, and "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
