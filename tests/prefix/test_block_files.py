"""Files of prefixes: fewer bytes than blocks have, and nothing in them that is not checked."""

import json
import os
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import feeding
import fitted
import mutate
import pytest
import safetensors.torch
import torch
from feeding import GEOMETRY
from kept_blocks import FEW, files, ids, rows, store

from kvq_runtime.disk import strict_json
from kvq_runtime.engines import keeper
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import lossless
from kvq_runtime.prefix import block_file, chain, sets
from kvq_runtime.prefix.shelf import Folder
from kvq_runtime.prefix.store import PrefixBlocks
from kvq_runtime.recipe import preset
from kvq_runtime.store.promise import Check, Promise

# ---- coded


def test_codes_of_a_file_take_fewer_bytes_and_need_the_fit_alone_to_be_read(tmp_path):
    """Without a fit's tensors a block is checked; with those of another fit it is no block; none is longer than raw."""
    kept, (keys, values) = store(tmp_path, "rest-1bit"), rows(2 * store(name="rest-1bit").block)
    count = kept.put(ids(2 * kept.block), keys, values)
    (first, second), form = kept.load(ids(count)), kept.format
    raw = sum(part["codes"].numel() for pair in second.fields.values() for part in pair)
    _, path = (kept.shelf.path(one) for one in chain.names(kept.root, chain.token_row(ids(count)), kept.block))  # type: ignore[attr-defined]
    data = path.read_bytes()
    assert len(data) < 0.8 * raw and first.fields.keys() == second.fields.keys() and not [*sets.damaged(tmp_path)]
    assert form.data_bytes(1) == raw + 5 and form.largest() > form.data_bytes(0)
    assert not any(replace(form, tensors=None).read(data)[1].fields[0][0])
    other = replace(form, tensors=fitted.tensors(form.recipe, GEOMETRY, 1))
    with pytest.raises(ArtifactError, match="coded: the codes are others|coded: something is left"):
        other.read(data)
    short = {layer: tuple({"codes": one["codes"][:-1]} for one in pair) for layer, pair in second.fields.items()}
    with pytest.raises(ValueError, match=r"key\.0\.codes: int8 \[15, 64\]; the recipe stores int8 \[16, 64\]"):
        form.to_bytes(replace(second, fields=short), form.read(data)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_a_file_take_fewer_bytes_and_are_the_same(tmp_path, dtype):
    """Checked without a fit, also by `verify`; and minus zero stays."""
    kept, plain = (store(tmp_path, name, dtype=dtype) for name in ("exact-coded", "exact"))
    count = 2 * kept.block
    keys, values = rows(count, dtype=dtype)
    keys[1][3, 0, 2] = -0.0
    assert kept.put(ids(count), keys, values) == plain.put(ids(count), keys, values) == count
    assert kept.tally["written"] < 0.9 * plain.tally["written"] and not [*sets.damaged(tmp_path)]
    found, exact = (one.load(ids(count))[1].fields for one in (kept, plain))
    for layer, pair in exact.items():
        for one, own in zip(found[layer], pair, strict=True):
            assert torch.equal(one["x"].view(torch.uint8), own["x"].view(torch.uint8))
    name = chain.names(kept.root, chain.token_row(ids(count)), kept.block)[1]
    data = kept.shelf.get(name, 1 << 20) or b""
    link, tensors = kept.format.read(data)[0], safetensors.torch.load(data)
    bad = torch.full_like(keys[0].flatten(1)[: kept.block], float("nan"))
    numbers = [bad for layer in range(GEOMETRY.layers) for _ in range(2)]
    for given, why in ((tensors["lossless"][:-4], "lossless: "), (lossless.encode(numbers), "finite: lossless")):
        about = block_file._about(link)
        about["content"] = block_file._content(about, {"lossless": given})
        told = safetensors.torch.save({"lossless": given}, {"kvq": strict_json.dumps(about)})
        with pytest.raises(ArtifactError, match=why):
            kept.format.read(told)


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


def test_threads_keep_the_same_bytes(tmp_path):
    given, (keys, values) = ids(1200), rows(1200)
    found = []
    for threads in (1, 3):
        kept = store(tmp_path / str(threads), "rest-1bit", threads=threads)
        assert kept.put(given, keys, values) == 1200 // kept.block * kept.block == len(kept.load(given)) * kept.block
        found.append({path.name: path.read_bytes() for path in (tmp_path / str(threads)).rglob("*.safetensors")})
    assert found[0] == found[1] and len(found[0]) > 3
    with pytest.raises(ValueError, match="threads=0; use 1 or more"):
        store(name="rest-1bit", threads=0)


def test_runs_are_short_where_blocks_are_large(monkeypatch):
    """The bytes that wait for files are bounded; files are the same."""
    tokens, (keys, values), found, runs = ids(1200), rows(1200), [], []
    for together in (32, 3):
        monkeypatch.setattr("kvq_runtime.prefix.store.HELD", together * store(name="aqua-2bit").format.usual())
        kept = store(name="aqua-2bit")
        encode = kept.coder.encode_run
        monkeypatch.setattr(
            kept.coder, "encode_run",
            lambda first, given, encode=encode: runs.append(len(given[0][0])) or encode(first, given),
        )  # fmt: skip
        kept.put(tokens, keys, values)
        assert max(runs) == together * kept.block
        runs.clear()
        found.append(kept.shelf._held)  # type: ignore[attr-defined]
    assert found[0] == found[1]
    monkeypatch.undo()
    size = Geometry(32, 8, 128)
    large, small = (PrefixBlocks(None, preset(name), size, model="m") for name in ("exact", "higgs-2bit"))
    assert large.together * large.format.usual() <= 64 << 20 and large.together < small.together <= 32


def test_numbers_of_another_width_are_refused():
    """They would be written, and found damaged."""
    with pytest.raises(ValueError, match="keys and values of float64; bfloat16, float16, float32 are kept"):
        store(dtype=torch.float64)


def test_threads_are_those_that_the_process_may_use(monkeypatch):
    for own, expected in ({3}, 1), ({*range(64)}, 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, own=own: own, raising=False)
        assert store().threads == expected


def test_an_engine_sets_its_threads(tmp_path):
    options = {"path": str(tmp_path / "kept"), "recipe": "rtn-2bit", "threads": 3}
    folder = Path(__file__).parents[2] / "artifacts" / "demo-model"
    config = json.loads((folder / "config.json").read_text())
    served = keeper.Served(config, str(folder), None, torch.bfloat16, None, feeding.rotary)
    assert [one.threads for one in keeper.opened(keeper.settings(options, "o", "w"), served, "w", 1)] == [3]
    with pytest.raises(ValueError, match="o: threads=0; use a number, 1 or more"):
        keeper.settings(options | {"threads": 0}, "o", "w")


def test_without_the_library_verify_checks_the_digest_alone(tmp_path, monkeypatch):
    kept, (keys, values) = store(tmp_path, "exact-coded"), rows(48)
    kept.put(ids(48), keys, values)
    monkeypatch.setitem(sys.modules, "constriction", None)
    assert not [*sets.damaged(tmp_path)]
    path = files(tmp_path)[1]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert [(one.path, one.fault[:8]) for one in sets.damaged(tmp_path)] == [(path, "content:")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sinks_of_a_file_take_fewer_bytes_and_are_the_same(tmp_path, monkeypatch, dtype):
    """Without the library a set of its own has them as they are; `verify` without it checks the digest alone."""
    found, count, form = [], 2 * store().block, None
    keys, values = rows(count, dtype=dtype)
    for there in (True, False):
        if not there:
            monkeypatch.setitem(sys.modules, "constriction", None)
        kept = store(tmp_path, dtype=dtype)
        assert not kept.longest(ids(count)) and kept.put(ids(count), keys, values) == count
        assert kept.format.coded_sinks is there and (form is None or kept.format == replace(form, coded_sinks=False))
        form = kept.format
        found.append((kept.tally["written"], kept.load(ids(count))[0].sinks_2LSC))
        assert not [*sets.damaged(tmp_path)]
    (less, sinks), (more, plain) = found
    assert sinks.dtype == dtype and torch.equal(sinks, plain) and sinks.numel()
    assert less < more - 0.1 * sinks.nbytes
    assert torch.equal(sinks[0, 1], keys[1].flatten(1)[: sinks.shape[2]])


def test_sinks_that_are_no_stream_of_sinks_are_refused():
    """However right a digest is: longer, shorter, of other numbers, as they are, or not finite."""
    kept = store()
    kept.put(ids(16), *rows(16))
    (data,), form = kept.shelf._held.values(), kept.format  # type: ignore[attr-defined]
    (link, block), tensors = form.read(data), safetensors.torch.load(data)
    bad = torch.full_like(block.sinks_2LSC, float("inf"))
    for given, why in (
        (torch.zeros(form.longest(0)["sinks"] + 1, dtype=torch.uint8), "tensors: sinks is not at most"),
        (block.sinks_2LSC, "tensors: sinks is not at most"),
        (tensors["sinks"][:-4], "lossless: "),
        (block_file.sinks_stream(block.sinks_2LSC[:, :1]), "lossless: "),
        (block_file.sinks_stream(bad), "finite: sinks has NaN"),
    ):
        with pytest.raises(ArtifactError, match=why):
            form.from_bytes(_sealed(link, tensors | {"sinks": given.contiguous()}), link)
    assert "sinks" not in form.longest(1) and not store(name="kivi-2bit").format.coded_sinks


def test_what_is_beyond_is_refused_unless_it_is_of_a_block():
    kept = store(promised=Check({(0, 0): Promise(1.0, 1, (1.0,) * 4)}))
    kept.put(ids(16), *(one[:] for one in rows(16)))
    (data,), form = kept.shelf._held.values(), kept.format  # type: ignore[attr-defined]
    (link, block), tensors = form.read(data), safetensors.torch.load(data)
    name = "key.0.exact"
    assert torch.equal(block.exact[0, 0], tensors[name]) and tensors[name].dtype == torch.uint8
    ends = torch.full((GEOMETRY.width, 2), torch.inf, dtype=torch.float16).view(torch.uint8)
    for given, why in (
        (tensors[name][:, :-1], r"tensors: \['key.0.exact'\]"),
        (tensors[name][:-1], r"tensors: \['key.0.exact'\]"),
        (tensors[name].int(), r"tensors: \['key.0.exact'\]"),
        (torch.cat([tensors[name][:, :-4], ends], 1), "finite: key.0.exact decodes to NaN"),
    ):
        with pytest.raises(ArtifactError, match=why):
            form.from_bytes(_sealed(link, tensors | {name: given.contiguous()}), link)


def _sealed(link: block_file.Link, tensors: dict[str, torch.Tensor]) -> bytes:
    """A file of these tensors, whose digest is right."""
    about = block_file._about(link)
    about["content"] = block_file._content(about, tensors)
    return safetensors.torch.save(tensors, {"kvq": strict_json.dumps(about)})


def test_nothing_is_encoded_after_a_block_that_is_gone(tmp_path, monkeypatch):
    kept, (keys, values) = store(tmp_path, threads=3), rows(1200)
    tokens, half, encoded = ids(1200), 3 * kept.block, []
    kept.put(tokens[:half], keys, values)
    kept.shelf.drop(chain.names(kept.root, chain.token_row(tokens), kept.block)[2])
    encode = kept.coder.encode_run
    monkeypatch.setattr(kept.coder, "encode_run", lambda *given: encoded.append(given[0]) or encode(*given))
    assert kept.put(tokens, [one[half:] for one in keys], [one[half:] for one in values], half) == 2 * kept.block
    assert not encoded


def test_a_block_that_a_write_evicts_ends_what_is_kept(tmp_path, monkeypatch):
    """It was there when threads were given work ahead."""
    kept, (keys, values), put = store(tmp_path, threads=3), rows(1200), Folder.put
    tokens = ids(1200)
    names = chain.names(kept.root, chain.token_row(tokens), kept.block)
    kept.put(tokens, keys, values)
    kept.shelf.drop(names[0])

    def evicting(self, name, data):
        put(self, name, data)
        self.drop(names[2])

    monkeypatch.setattr(Folder, "put", evicting)
    assert kept.put(tokens, keys, values) == 2 * kept.block == kept.longest(tokens)


def test_a_disk_that_refuses_in_the_middle_leaves_what_was_kept(tmp_path, monkeypatch):
    kept, (keys, values), put = store(tmp_path, "rest-1bit", threads=2), rows(1200), Folder.put
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


def test_a_stream_longer_than_its_codes_is_not_decoded():
    """However right its digest is."""
    kept, (keys, values) = store(name="rest-1bit"), rows(store(name="rest-1bit").block)
    kept.put(ids(kept.block), keys, values)
    (data,), form = kept.shelf._held.values(), kept.format  # type: ignore[attr-defined]
    link, tensors = form.read(data)[0], safetensors.torch.load(data)
    for given in (
        torch.zeros(form.data_bytes(1) + 1, dtype=torch.uint8),
        tensors["coded"][None],
        tensors["coded"].int(),
    ):
        bad, about = tensors | {"coded": given.contiguous()}, block_file._about(link)
        about["content"] = block_file._content(about, bad)
        with pytest.raises(ArtifactError, match="tensors: coded is not at most"):
            form.from_bytes(safetensors.torch.save(bad, {"kvq": strict_json.dumps(about)}), link)


# ---- a damaged, foreign or malicious file


def test_any_damaged_byte_is_a_miss_and_is_said(tmp_path, caplog):
    kept, (keys, values) = store(tmp_path), rows(48)
    kept.put(ids(48), keys, values)
    path = kept.shelf.path(chain.names(kept.root, chain.token_row(ids(48)), 16)[1])  # type: ignore[attr-defined]
    whole = path.read_bytes()
    assert not [*sets.damaged(tmp_path)]
    generator = torch.Generator().manual_seed(0)
    for place in [0, 7, 8, 20, len(whole) - 1, *torch.randint(0, len(whole), (40,), generator=generator).tolist()]:
        caplog.clear()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        assert [one.path for one in sets.damaged(tmp_path)] == [path]
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
    assert [one.path for one in sets.damaged(tmp_path)] == [paths[1]]
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
