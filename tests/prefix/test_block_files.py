"""Files of prefixes: nothing in them that is not checked."""

import random
from collections import Counter

import pytest
import safetensors.torch
import torch
from kept_blocks import FEW, decoded, files, ids, rows, store

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.prefix import block
from kvq_runtime.prefix.block import Link


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


def test_a_block_of_another_tenant_or_model_is_a_miss(tmp_path, caplog):
    """Also where whoever has the folder copies it to the name that it would have."""
    kept, (keys, values) = store(tmp_path).of_tenant("a"), rows(16)
    kept.put(ids(16), keys, values)
    data = kept.folder.path(kept.names(ids(16))[0]).read_bytes()
    for other in (kept.of_tenant("b"), store(tmp_path).of_tenant("a\0"), store(tmp_path), store(tmp_path, model="n")):
        caplog.clear()
        other.folder.path(other.names(ids(16))[0]).write_bytes(data)
        assert other.load(ids(16)) == [] and "of another recipe, artifact, model, tenant or place" in caplog.text
    assert len(kept.load(ids(16))) == 1


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


def test_what_is_kept_is_found_however_large_the_numbers(tmp_path):
    """A block whose scales would overflow is refused, and not found damaged later."""
    kept, (keys, values) = store(tmp_path, "kivi-2bit"), rows(64)
    keys[1][:, 0, 3] = 1e7
    with pytest.raises(ValueError, match=r"layer 1, from block 0 on: the model's keys are too large for the scales of"):
        kept.put(ids(64), keys, values)
    assert kept.longest(ids(64)) == 0


def test_a_block_that_decodes_to_infinity_is_not_decoded(tmp_path):
    """Every number in its file is finite, and its digest is right."""
    kept, text = store(tmp_path, dtype=torch.float16), ids(16)
    kept.put(text, *rows(16, dtype=torch.float16))
    path, link = kept.folder.path(kept.names(text)[0]), kept._link(kept.names(text), torch.tensor(text), 0)
    tensors = safetensors.torch.load(path.read_bytes())
    tensors["packed.float16"].fill_(torch.finfo(torch.float16).max)
    path.write_bytes(_sealed(tensors, link))
    blocks = kept.load(text)
    with pytest.raises(ArtifactError, match="finite: layer 0 decodes to NaN or infinity; it is computed again"):
        decoded(kept, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_no_file_with_a_right_digest_decodes_to_what_is_not_finite(name, tmp_path, monkeypatch):
    """Whoever may write to the folder can make a digest: bytes of a tensor are changed, and it is made again."""
    monkeypatch.setattr("kvq_runtime.prefix.store._log.warning", lambda *_: None)
    kept = store(tmp_path, name)
    text, seen = ids(2 * kept.block), Counter[str]()
    kept.put(text, *rows(2 * kept.block))
    path = kept.folder.path(kept.names(text)[1])
    good, link = path.read_bytes(), kept._link(kept.names(text), torch.tensor(text), 1)
    for number in range(30):
        path.write_bytes(_resealed(good, link, random.Random(number)))
        blocks = kept.load(text)
        seen["missing" if len(blocks) == 1 else "decoded"] += 1
        assert path.exists() == (len(blocks) == 2), number
        assert all(bool(x.isfinite().all()) for pair in decoded(kept, blocks).values() for x in pair), number
    assert seen["decoded"] > 0


def _resealed(good: bytes, link: Link, draw: random.Random) -> bytes:
    """The file with other bytes in a tensor, and the right digest."""
    tensors = safetensors.torch.load(good)
    data = tensors[draw.choice([*tensors])].view(-1).view(torch.uint8)
    begin = draw.randrange(len(data)) & ~3
    fill = draw.choice((b"\x00\x7c", b"\xff\x7b", b"\x80\x7f", b"\xff", draw.randbytes(8))) * 200
    stop = min(len(data), begin + draw.choice((1, 8, 200)))
    data[begin:stop] = torch.frombuffer(bytearray(fill[: stop - begin]), dtype=torch.uint8)
    return _sealed(tensors, link)


def _sealed(tensors: dict[str, torch.Tensor], link: Link) -> bytes:
    about = link.to_json(block._content(link, tensors))
    return safetensors.torch.save(tensors, {"kvq": strict_json.dumps(about)})
