"""Files of prefixes: nothing in them that is not checked."""

import random
from collections import Counter

import mutate
import pytest
import safetensors.torch
import torch
from kept_blocks import FEW, files, ids, rows, store

from kvq_runtime.disk import strict_json
from kvq_runtime.prefix import block_file, chain, maintenance
from kvq_runtime.prefix.block_folder import Folder

# ---- a whole file


def test_a_header_has_an_entry_a_dtype_however_layers_differ(tmp_path):
    """The first layer's numbers are those of the model, the others' are codes and scales."""
    kept = store(tmp_path, "aqua-2bit-first-16bit")
    count = 2 * kept.block
    assert kept.put(ids(count), *rows(count)) == count
    first, second = (
        kept.shelf.get(one, 1 << 20) or b"" for one in chain.names(kept.root, torch.tensor(ids(count)), kept.block)
    )
    names = {"packed.bfloat16", "packed.uint8", "packed.float16"}
    assert safetensors.torch.load(first).keys() == names | {"sinks"} and safetensors.torch.load(second).keys() == names


def test_numbers_of_another_width_are_refused():
    """They would be written, and found damaged."""
    with pytest.raises(ValueError, match="keys and values of float64; bfloat16, float16, float32 are kept"):
        store(dtype=torch.float64)


def test_nothing_is_encoded_after_a_block_that_is_gone(tmp_path, monkeypatch):
    kept, (keys, values) = store(tmp_path), rows(1200)
    tokens, half, encoded = ids(1200), 3 * kept.block, []
    kept.put(tokens[:half], keys, values)
    kept.shelf.drop(chain.names(kept.root, chain.token_row(tokens), kept.block)[2])
    encode = kept.codec.encode
    monkeypatch.setattr(kept.codec, "encode", lambda *given: encoded.append(given[0]) or encode(*given))
    assert kept.put(tokens, [one[half:] for one in keys], [one[half:] for one in values], half) == 2 * kept.block
    assert not encoded


def test_a_disk_that_refuses_in_the_middle_leaves_what_was_kept(tmp_path, monkeypatch):
    kept, (keys, values), put = store(tmp_path), rows(1200), Folder.put
    written = []

    def full(self, name, data):
        if len(written) == 2:
            raise OSError("no space")
        written.append(name)
        put(self, name, data)

    monkeypatch.setattr(Folder, "put", full)
    with pytest.raises(OSError, match="no space"):
        kept.put(ids(1200), keys, values)
    assert (
        kept.longest(ids(1200)) == 2 * kept.block
        and written == chain.names(kept.root, chain.token_row(ids(1200)), kept.block)[:2]
    )


# ---- a damaged, foreign or malicious file


def test_any_damaged_byte_is_a_miss_and_is_said(tmp_path, caplog):
    kept, (keys, values) = store(tmp_path), rows(48)
    kept.put(ids(48), keys, values)
    path = kept.shelf.path(chain.names(kept.root, chain.token_row(ids(48)), 16)[1])  # type: ignore[attr-defined]
    whole = path.read_bytes()
    assert not [*maintenance.damaged(tmp_path)]
    generator = torch.Generator().manual_seed(0)
    for place in [0, 7, 8, 20, len(whole) - 1, *torch.randint(0, len(whole), (40,), generator=generator).tolist()]:
        caplog.clear()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        assert [one.path for one in maintenance.damaged(tmp_path)] == [path]
        assert len(kept.load(ids(48))) == 1 and "damaged, and removed" in caplog.text
        assert not path.exists()
        path.write_bytes(whole)
    for torn in (b"", whole[:4], whole[:100], whole[:-1], whole + b"\0", whole * 3):
        path.write_bytes(torn)
        assert len(kept.load(ids(48))) == 1
    assert kept.put(ids(48), keys, values) == 48 and path.read_bytes() == whole  # written again


@pytest.mark.slow
def test_no_mutant_of_a_block_decodes_to_what_is_not_finite(tmp_path, monkeypatch):
    """300 changes of bytes and of tensors, the latter with the digest made again: missing, the same, or finite."""
    monkeypatch.setattr("kvq_runtime.prefix.store._log.warning", lambda *_: None)
    stores, counts, means = [], Counter(), {}
    for name in FEW:
        kept = store(tmp_path / name, name)
        keys, values = rows(2 * kept.block)
        kept.put(ids(2 * kept.block), keys, values)
        names, shelf = chain.names(kept.root, chain.token_row(ids(2 * kept.block)), kept.block), kept.shelf
        paths = [shelf.path(one) for one in names]  # type: ignore[attr-defined]
        stores.append((kept, [(path, path.read_bytes()) for path in paths]))
        found = kept.load(ids(2 * kept.block))
        means[id(kept)] = {layer: [x.clone() for x in pair] for layer, *pair in kept.decode(found)}
    for number in range(300):
        draw = random.Random(number)
        kept, written = draw.choice(stores)
        place = draw.randrange(2)
        path, good = written[place]
        data = _resealed(good, draw) if number % 2 else mutate.some_bytes(good, written[1 - place][1], draw)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        found = kept.load(ids(2 * kept.block))
        if len(found) <= place:
            counts["missing"] += 1
            assert not path.exists(), number
        else:
            counts["decoded"] += 1
            for layer, *pair in kept.decode(found):
                assert all(bool(x.isfinite().all()) for x in pair), number
                assert number % 2 or all(map(torch.equal, pair, means[id(kept)][layer])), "no check told of the change"
        for path, good in written:
            path.unlink(missing_ok=True)
            path.write_bytes(good)
    assert counts["missing"] > 100 and counts["decoded"] > 50


def _resealed(good: bytes, draw: random.Random) -> bytes:
    """The file with other bytes in a tensor, and the right digest."""
    start = 8 + int.from_bytes(good[:8], "little")
    about = strict_json.loads(strict_json.loads(good[8:start], "header")["__metadata__"]["kvq"], "kvq")
    tensors = safetensors.torch.load(good)
    name = draw.choice([*tensors])
    data = tensors[name].view(-1).view(torch.uint8)
    begin = draw.randrange(len(data)) & ~3
    fill = draw.choice((b"\x00\x7c", b"\xff\x7b", b"\x80\x7f", b"\xff", draw.randbytes(8))) * 200
    stop = min(len(data), begin + draw.choice((1, 8, 200)))
    data[begin:stop] = torch.frombuffer(bytearray(fill[: stop - begin]), dtype=torch.uint8)
    about["content"] = block_file._content({n: v for n, v in about.items() if n != "content"}, tensors)
    return safetensors.torch.save(tensors, {"kvq": strict_json.dumps(about)})


def test_a_block_of_another_place_is_a_miss(tmp_path):
    """Files that are whole, under each other's names: verify and load see it."""
    kept, (keys, values) = store(tmp_path), rows(48)
    kept.put(ids(48), keys, values)
    names = chain.names(kept.root, chain.token_row(ids(48)), 16)
    paths = [kept.shelf.path(name) for name in names]  # type: ignore[attr-defined]
    data = [path.read_bytes() for path in paths]
    paths[1].write_bytes(data[2])
    assert [one.path for one in maintenance.damaged(tmp_path)] == [paths[1]]
    assert len(kept.load(ids(48))) == 1


def test_a_file_without_end_a_link_or_a_folder_is_a_miss(tmp_path):
    kept, (keys, values) = store(tmp_path), rows(16)
    kept.put(ids(16), keys, values)
    (path,) = files(tmp_path)
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a terabyte that is never read
    assert kept.load(ids(16)) == []
    path.with_name("elsewhere").write_bytes(data)
    path.symlink_to(path.with_name("elsewhere"))
    assert kept.load(ids(16)) == []
    path.mkdir()
    path.joinpath("theirs").write_bytes(b"theirs")
    assert kept.load(ids(16)) == [] and not path.exists()
    path.mkdir()
    assert kept.put(ids(16), keys, values) == 16 and len(kept.load(ids(16))) == 1  # a folder is put aside
    assert [one.read_bytes() for one in tmp_path.rglob("theirs")] == [b"theirs"]
