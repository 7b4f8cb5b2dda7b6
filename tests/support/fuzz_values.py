"""Random values for the fuzz targets: valid ones by type, wild ones, and mutations of both. All from one seed."""

import random
import string
from typing import Any

import msgspec
from msgspec import inspect

WILD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    -(2**63),
    2**63 - 1,
    2**64,
    10**400,
    0.0,
    -0.0,
    1e308,
    5e-324,
    "",
    "\x00",
    "\ud7ff",
    "../../etc/passwd",
    "a" * 5000,
    "\N{RIGHT-TO-LEFT OVERRIDE}x",
    [],
    {},
    [[]],
    [[0, -1]],
    {"": {}},
    {"__class__": "x"},
)
MOST_DEPTH = 4


def valid(kind: Any, draw: random.Random, depth: int = 0) -> Any:
    """A value (builtins only) that this type accepts, as far as the type alone says."""
    info = kind if isinstance(kind, inspect.Type) else inspect.type_info(kind)
    if isinstance(info, inspect.StructType):
        return _struct(info, draw, depth)
    if isinstance(info, inspect.UnionType):
        return valid(draw.choice(info.types), draw, depth)
    if isinstance(info, inspect.LiteralType):
        return draw.choice(info.values)
    if isinstance(info, inspect.ListType | inspect.VarTupleType | inspect.SetType | inspect.FrozenSetType):
        return [valid(info.item_type, draw, depth + 1) for _ in range(0 if depth > MOST_DEPTH else draw.randrange(4))]
    if isinstance(info, inspect.TupleType):
        return [valid(item, draw, depth + 1) for item in info.item_types]
    if isinstance(info, inspect.DictType):
        count = 0 if depth > MOST_DEPTH else draw.randrange(4)
        return {str(valid(str, draw)): valid(info.value_type, draw, depth + 1) for _ in range(count)}
    return _plain(info, draw)


def _struct(info: inspect.StructType, draw: random.Random, depth: int) -> dict[str, Any]:
    made = {info.tag_field: info.tag} if info.tag_field is not None else {}
    for field in info.fields:
        if field.required or draw.random() < 0.6:
            made[field.encode_name] = valid(field.type, draw, depth + 1)
    return made


def _plain(info: Any, draw: random.Random) -> Any:
    if isinstance(info, inspect.BoolType):
        return draw.random() < 0.5
    if isinstance(info, inspect.IntType):
        return draw.choice([0, 1, 7, draw.randrange(-1000, 1 << 20), draw.randrange(-(2**63), 2**63)])
    if isinstance(info, inspect.FloatType):
        return draw.choice([0.0, 1.5, -1.0, draw.random() * 1e6, 1e300])
    if isinstance(info, inspect.NoneType):
        return None
    if isinstance(info, inspect.BytesType):
        return draw.randbytes(draw.randrange(40))
    if isinstance(info, inspect.AnyType):
        return draw.choice(WILD)
    return "".join(draw.choices(string.ascii_letters + string.digits + "-_./ é", k=draw.randrange(24)))


def mutated(value: Any, draw: random.Random) -> Any:
    """The same with one place changed: replaced, dropped, doubled, renamed, or nested deeper."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        how = draw.randrange(6)
        if how == 0:
            return rest
        if how == 1:
            return {**rest, f"{key}{draw.choice(['', 'x', ' '])}": draw.choice(WILD)}
        return {**rest, key: mutated(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], mutated(value[place], draw), *value[place + draw.randrange(2) :]]
    if draw.random() < 0.02:
        return nested(draw.choice([3, 50, 300, 900, 5000]))
    return draw.choice(WILD)


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    made: Any = []
    for _ in range(depth):
        made = [made]
    return made


def mangled(body: bytes, draw: random.Random) -> bytes:
    """Other bytes than `body`: bits flipped, pieces cut, doubled, moved or put in."""
    made = bytearray(body)
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        place = draw.randrange(len(made) + 1)
        how = draw.randrange(5)
        if how == 0 and place < len(made):
            made[place] ^= 1 << draw.randrange(8)
        elif how == 1:
            del made[place : place + draw.randrange(1, 9)]
        elif how == 2:
            made[place:place] = draw.randbytes(draw.randrange(1, 9))
        elif how == 3:
            made[place:place] = made[: draw.randrange(64)]
        elif place < len(made):
            made[place:] = b""
    return bytes(made) if bytes(made) != body else body + b"\x00"


def as_json(value: Any) -> bytes:
    """JSON of builtins; numbers beyond 64 bits too."""
    import json

    try:
        return json.dumps(value, default=repr).encode(errors="surrogatepass")
    except RecursionError:
        pass
    deep = b"[" * 20_000 + b"]" * 20_000
    if not isinstance(value, dict) or not value:
        return deep
    return b'{"' + next(iter(value)).encode(errors="replace") + b'": ' + deep + b"}"


def as_msgpack(value: Any) -> bytes:
    """msgpack, with what it cannot hold turned into text."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=repr)
    except RecursionError:
        return b"\x91" * 5000  # a list in a list in a list
    except (OverflowError, UnicodeEncodeError):
        return msgspec.msgpack.encode(
            [str(key)[:99] for key in value][:9] if isinstance(value, dict) else str(type(value))
        )
