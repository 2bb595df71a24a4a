"""Files of prefixes: nothing in them that is not checked."""

import random
from collections import Counter

import mutate
import pytest
import safetensors.torch
import torch
from kept_blocks import FEW, decoded, files, ids, rows, store

from kvq_runtime.disk import strict_json
from kvq_runtime.prefix import block_file
from kvq_runtime.prefix.block_file import Link


def test_any_damaged_byte_or_torn_file_is_a_miss(tmp_path, caplog):
    """The log says it, the file is removed, and the next `put` writes it."""
    kept, (keys, values) = store(tmp_path), rows(48)
    kept.put(ids(48), keys, values)
    path = kept.folder.path(kept.names(ids(48))[1])
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    places = [0, 7, 8, 20, len(whole) - 1, *torch.randint(0, len(whole), (20,), generator=generator).tolist()]
    damaged = [whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :] for place in places]
    for data in (*damaged, b"", whole[:4], whole[:100], whole[:-1], whole + b"\0", whole * 3):
        caplog.clear()
        path.write_bytes(data)
        assert len(kept.load(ids(48))) == 1 and "damaged, and removed" in caplog.text
        assert not path.exists()
    assert kept.put(ids(48), keys, values) == 48 and path.read_bytes() == whole


def test_a_block_of_another_place_is_a_miss(tmp_path):
    kept, (keys, values) = store(tmp_path), rows(48)
    kept.put(ids(48), keys, values)
    paths = [kept.folder.path(name) for name in kept.names(ids(48))]
    paths[1].write_bytes(paths[2].read_bytes())
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
    path.unlink(missing_ok=True)
    path.mkdir()
    assert kept.load(ids(16)) == [] and path.is_dir()


@pytest.mark.slow
def test_no_mutant_of_a_block_decodes_to_what_is_not_finite(tmp_path, monkeypatch):
    """300 changes of bytes and of tensors, the latter with the digest made again: missing, the same, or finite."""
    monkeypatch.setattr("kvq_runtime.prefix.store._log.warning", lambda *_: None)
    stores, counts, means = [], Counter(), {}
    for name in FEW:
        kept = store(tmp_path / name, name)
        text = ids(2 * kept.block)
        kept.put(text, *rows(2 * kept.block))
        stores.append((kept, [(path, path.read_bytes()) for path in map(kept.folder.path, kept.names(text))]))
        means[name] = decoded(kept, kept.load(text))
    for number in range(300):
        draw = random.Random(number)
        place, which = draw.randrange(2), draw.randrange(len(stores))
        kept, written = stores[which]
        path, good = written[place]
        text = ids(2 * kept.block)
        if number % 2:
            path.write_bytes(_resealed(good, kept._link(kept.names(text), torch.tensor(text), place), draw))
        else:
            path.write_bytes(mutate.some_bytes(good, written[1 - place][1], draw))
        found = kept.load(text)
        if len(found) <= place:
            counts["missing"] += 1
            assert not path.exists(), number
        else:
            counts["decoded"] += 1
            for layer, pair in decoded(kept, found).items():
                assert all(bool(x.isfinite().all()) for x in pair), number
                assert number % 2 or all(map(torch.equal, pair, means[FEW[which]][layer])), "a change went unnoticed"
        for path, good in written:
            path.write_bytes(good)
    assert counts["missing"] > 100 and counts["decoded"] > 50


def _resealed(good: bytes, link: Link, draw: random.Random) -> bytes:
    """The file with other bytes in a tensor, and the right digest."""
    tensors = safetensors.torch.load(good)
    data = tensors[draw.choice([*tensors])].view(-1).view(torch.uint8)
    begin = draw.randrange(len(data)) & ~3
    fill = draw.choice((b"\x00\x7c", b"\xff\x7b", b"\x80\x7f", b"\xff", draw.randbytes(8))) * 200
    stop = min(len(data), begin + draw.choice((1, 8, 200)))
    data[begin:stop] = torch.frombuffer(bytearray(fill[: stop - begin]), dtype=torch.uint8)
    about = link.to_json(block_file._content(link, tensors))
    return safetensors.torch.save(tensors, {"kvq": strict_json.dumps(about)})
