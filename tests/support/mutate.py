"""Mutate a valid file in a few places: bytes, JSON values, tensors or its header."""

import json
import random
from collections.abc import Callable
from hashlib import sha256
from typing import Any

Random = random.Random
TOKENS = (
    b"null", b"true", b"NaN", b"1e999", b"-1", b"0", b'"', b"\\", b"{", b"}", b"[" * 40, b"]", b",", b":", b" ", b"\0",
    b"\xff", b"../", b'"kvq":', b'"schema":1,', b"99999999999999999999",
)  # fmt: skip
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 8, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "../x", "os.system", "é\n\0", "x" * 2000, [], [1], [[[]]], {}, {"kind": "os.system"}, {"": {}},
)  # fmt: skip


# ---- bytes


def some_bytes(good: bytes, other: bytes, draw: Random) -> bytes:
    """One to three changes of bytes; `other` is another file to splice from."""
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        draw.choice(_BYTES)(data, other, draw)
    return bytes(data)


def _place(data: bytearray, draw: Random) -> int:
    """A random position, more often near the beginning, where the header is."""
    return draw.randrange(draw.choice((9, min(len(data), 3000) + 1, len(data) + 1, len(data) + 1)))


def _flip(data: bytearray, other: bytes, draw: Random) -> None:
    if data:
        data[min(_place(data, draw), len(data) - 1)] ^= 1 << draw.randrange(8)


def _digit(data: bytearray, other: bytes, draw: Random) -> None:
    digits = [place for place, byte in enumerate(data[:6000]) if 48 <= byte < 58]
    if digits:
        data[draw.choice(digits)] = draw.randrange(48, 58)


def _insert(data: bytearray, other: bytes, draw: Random) -> None:
    place = _place(data, draw)
    data[place:place] = draw.choice((draw.choice(TOKENS), draw.randbytes(draw.randrange(1, 40))))


def _overwrite(data: bytearray, other: bytes, draw: Random) -> None:
    place, token = _place(data, draw), draw.choice(TOKENS)
    data[place : place + len(token)] = token


def _delete(data: bytearray, other: bytes, draw: Random) -> None:
    place = _place(data, draw)
    del data[place : place + draw.choice((1, 2, 8, 100, 1000))]


def _repeat(data: bytearray, other: bytes, draw: Random) -> None:
    place = _place(data, draw)
    data[place:place] = data[place : place + draw.choice((1, 8, 100, 1000))]


def _cut(data: bytearray, other: bytes, draw: Random) -> None:
    del data[draw.randrange(len(data) + 1) :]


def _splice(data: bytearray, other: bytes, draw: Random) -> None:
    data[_place(data, draw) :] = other[draw.randrange(len(other)) :]


def _length(data: bytearray, other: bytes, draw: Random) -> None:
    stated = int.from_bytes(data[:8], "little") + draw.choice((-8, -1, 1, 8, 1 << 20, 1 << 40, -(1 << 62)))
    data[:8] = (stated % (1 << 64)).to_bytes(8, "little")


def _space(data: bytearray, other: bytes, draw: Random) -> None:
    """Pad the header with a space, as its format allows: the content is the same."""
    length = int.from_bytes(data[:8], "little")
    if length < len(data):
        data[8 + length : 8 + length] = b" "
        data[:8] = (length + 1).to_bytes(8, "little")


_BYTES: tuple[Callable[[bytearray, bytes, Random], None], ...] = (
    _flip, _digit, _insert, _overwrite, _delete, _repeat, _cut, _splice, _length, _space,
)  # fmt: skip


# ---- JSON


def some_json(tree: Any, vocabulary: dict[str, list], draw: Random) -> Any:
    """One or two changes of a JSON value, in place; `vocabulary` has values that other files have under each key."""
    for _ in range(draw.choice((1, 1, 1, 2))):
        targets = places(tree)
        if not targets:
            return tree
        holder, key = draw.choice(targets)
        draw.choice(_JSON)(holder, key, vocabulary, draw)
    return tree


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [place for key in keys for place in places(tree[key])]


def vocabulary(trees: list[Any]) -> dict[str, list]:
    """{key: every distinct value under it}."""
    values: dict[str, dict[str, Any]] = {}
    for tree in trees:
        for holder, key in places(tree):
            values.setdefault(str(key), {})[json.dumps(holder[key])] = holder[key]
    return {key: list(distinct.values()) for key, distinct in values.items()}


def _known(holder: Any, key: Any, known: dict[str, list], draw: Random) -> None:
    """A value that is valid under this key in another place."""
    holder[key] = copied(draw.choice(known.get(str(key), VALUES)))


def _strange(holder: Any, key: Any, known: dict[str, list], draw: Random) -> None:
    holder[key] = copied(draw.choice(VALUES))


def _number(holder: Any, key: Any, known: dict[str, list], draw: Random) -> None:
    value = holder[key]
    if isinstance(value, (int, float)):
        holder[key] = draw.choice((value + 1, value - 1, -value, value * 2, float(value), value * 10**9, str(value)))
    elif isinstance(value, str):
        holder[key] = draw.choice((value + "x", value[1:], value.upper(), value + "\n", f"../{value}", [value]))


def _drop(holder: Any, key: Any, known: dict[str, list], draw: Random) -> None:
    del holder[key]


def _add(holder: Any, key: Any, known: dict[str, list], draw: Random) -> None:
    name = draw.choice((*known, "module", "", "0", "7", "9999"))
    if isinstance(holder, dict):
        holder[name] = copied(draw.choice(known.get(name, VALUES)))
    else:
        holder.insert(key, copied(draw.choice(VALUES)))


def _swap(holder: Any, key: Any, known: dict[str, list], draw: Random) -> None:
    other = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]


_JSON: tuple[Callable[[Any, Any, dict[str, list], Random], None], ...] = (
    _known, _known, _known, _strange, _number, _number, _drop, _add, _swap,
)  # fmt: skip


def copied(tree: Any) -> Any:
    return json.loads(json.dumps(tree))


# ---- an artifact with a new digest


def opened(good: bytes) -> tuple[dict, dict, bytearray]:
    """Metadata without the digest `content`, entries and data of a file."""
    start = 8 + int.from_bytes(good[:8], "little")
    entries = json.loads(good[8:start])
    about = json.loads(entries.pop("__metadata__")["kvq"])
    about.pop("content")
    return about, entries, bytearray(good[start:])


def sealed(about: Any, entries: Any, body: bytes) -> bytes:
    """A file with the right digest, whatever its content."""
    dumps = lambda value: json.dumps(value, sort_keys=True, separators=(",", ":"))  # noqa: E731
    content = sha256(dumps({"kvq": about, "tensors": entries}).encode() + body).hexdigest()
    about = about | {"content": content} if isinstance(about, dict) else about
    head = dumps({"__metadata__": {"kvq": dumps(about)}, **entries}).encode()
    return len(head).to_bytes(8, "little") + head + body


def resealed(good: bytes, known: dict[str, list], draw: Random) -> bytes:
    """A change of recipe, fingerprint, other metadata, entries or data, with the right digest."""
    about, entries, body = opened(good)
    match draw.choice(
        ("recipe", "recipe", "recipe", "fingerprint", "fingerprint", "about", "entries", "tensor", "data")
    ):
        case "recipe":
            some_json(about["recipe"], known, draw)
        case "fingerprint":
            some_json(about["fingerprint"], known, draw)
        case "about":
            about = some_json(about, known, draw)
        case "entries":
            some_json(entries, known, draw)
        case "tensor":
            _tensor(entries, body, draw)
        case "data":
            _data(body, draw)
    return sealed(about, entries, bytes(body))


def _tensor(entries: dict, body: bytearray, draw: Random) -> None:
    """Drop, add, rename, reshape or retype a tensor."""
    last = max(entries, key=lambda name: entries[name]["data_offsets"][1])
    name = draw.choice(list(entries))
    match draw.choice(("drop", "add", "rename", "reshape", "dtype")):
        case "drop":
            del body[entries.pop(last)["data_offsets"][0] :]
        case "add":
            end = len(body)
            spy = draw.choice(("layers.0.key.predict.spy", "layers.9.value.predict.mean", "layers.0.key.rotate.basis"))
            entries[spy] = {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}
            body += b"four"
        case "rename":
            entries[draw.choice((name + "x", name.replace("0", "1"), f"../{name}"))] = entries.pop(name)
        case "reshape":
            shape = entries[name]["shape"]
            entries[name]["shape"] = draw.choice((shape[::-1], [1, *shape], [*shape, 1], [0, *shape]))
        case "dtype":
            entries[name]["dtype"] = draw.choice(("F32", "I32", "U8", "BF16", "F16", "F64", "BOOL"))


def _data(body: bytearray, draw: Random) -> None:
    """Overwrite one to eight places; four bytes 0xff are NaN in every float format."""
    for _ in range(draw.randrange(1, 9)):
        place = draw.randrange(len(body))
        body[place : place + 4] = draw.choice((b"\xff\xff\xff\xff", draw.randbytes(4)))[: len(body) - place]
