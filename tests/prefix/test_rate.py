"""What files hold beside codes, against the files of a store; and artifacts at another rate than their fit's."""

from pathlib import Path

import pytest
import torch

from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.codec.shared import Fitted
from kvq_runtime.disk import strict_json
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import entropy, ladder
from kvq_runtime.prefix import block_file, rate
from kvq_runtime.prefix.block_file import beside
from kvq_runtime.recipe import preset


def test_sinks_and_frames_beside_codes_by_hand():
    recipe, geometry = preset("rest-1bit"), Geometry(30, 3, 64)
    frame = 8 * block_file.frame(128) / (128 * 2 * 30 * 192)
    assert beside(recipe, geometry) == pytest.approx(4 * 16 / 1024 + frame)
    assert beside(recipe, geometry, 4096) == pytest.approx(4 * 16 / 4096 + frame)
    assert beside(recipe, geometry, 1) == beside(recipe, geometry, 128) == pytest.approx(0.5 + frame)


@pytest.mark.parametrize("number", [0, 7])
def test_a_frame_is_what_a_file_has_beside_its_tensors(number):
    """Of a block with sinks another name stands in it."""
    recipe, geometry = preset("rest-1bit"), Geometry(2, 2, 16)
    codes = torch.zeros(128, 32, dtype=torch.int8)
    tensors = {f"layers.{n}.{role}.quantize.rung": torch.zeros(32, dtype=torch.uint8) for n in range(2)
               for role in ("key", "value")}  # fmt: skip
    form = block_file.BlockFormat(recipe, geometry, torch.bfloat16, tensors)
    block = block_file.Block({n: ({"codes": codes}, {"codes": codes}) for n in range(2)}, torch.zeros(2, 2, 4, 32))
    link = block_file.Link("1" * 64, "2" * 64, number, tuple(range(1000, 1128)))
    data = form.to_bytes(block, link)
    head = 8 + int.from_bytes(data[:8], "little")
    assert block_file.frame(128) == pytest.approx(head + block_file.entropy.HEADER, rel=0.08)


GOLDEN = Path(__file__).parents[2] / "artifacts" / "golden" / "v1"


@pytest.fixture(scope="module")
def fitted() -> Artifact:
    return artifact.load(GOLDEN / "rest-1bit.safetensors")


def steps(one: Artifact) -> torch.Tensor:
    stages = [scheme.quantize for n in range(one.fingerprint.geometry.layers) for scheme in one.recipe.at(n)]
    return torch.tensor([stage.step for stage in stages], dtype=torch.float64)  # type: ignore[attr-defined]


def test_all_steps_are_coarser_by_one_factor_and_deviations_stay(fitted):
    made = rate.coarser(fitted, 1.09)
    ratio = steps(made) / steps(fitted)
    assert 1 < ratio[0] < 2 and torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-5)
    assert made.recipe.name.startswith("rest-1bit,bits=1.0") and not made.fit and made.fingerprint == fitted.fingerprint
    assert made.recipe.check(made.fingerprint.geometry)
    for name, tensor in fitted.tensors.items():
        if not name.endswith(("cell", "rung")):
            assert tensor is made.tensors[name]
        if name.endswith("cell"):
            rung = name.replace("cell", "rung")
            before, after = (
                one.tensors[name].double().log2() + (one.tensors[rung].double() / ladder.PER) for one in (fitted, made)
            )
            assert (after - before).abs().max() <= 0.5 / ladder.PER + 1e-6
            assert bool((made.tensors[name] >= tensor).all())
    finer = rate.coarser(fitted, 1.15)
    assert (steps(finer) < steps(made)).all()
    assert torch.equal(steps(rate.coarser(fitted, 1.09)), steps(made))


def test_codes_take_what_was_asked(fitted):
    """Latents of the energies that the model of rates has, rounded by the made artifact's cells, through the coder."""
    model, bits = rate._Model(fitted), 1.09
    made, found, count = rate.coarser(fitted, bits), 0.0, 0
    number = round(rate.PER * float((steps(made) / steps(fitted))[0].log2()))
    energies, generator = model._passed(2.0 ** (number / rate.PER))[0], torch.Generator().manual_seed(0)
    for place in model.places:
        cell, rung = (made.tensors["layers.{}.{}.quantize.{}".format(*place, name)] for name in ("cell", "rung"))
        deviation_R = energies[place].sqrt().float() * cell
        codes = ladder.encode(deviation_R * torch.randn(1, 4096, len(cell), generator=generator), cell, rung)[0]
        found += entropy.bits([codes], [rung])
        count += 4096 * fitted.fingerprint.geometry.width
    assert found / count + model.fixed == pytest.approx(bits, rel=0.06)


def test_what_a_fit_counted_is_the_rate_at_its_own_step(fitted):
    places = {"key": {"coded_bits": 0.9}, "value": {"coded_bits": 1.1}}
    counted = Artifact(
        fitted.recipe, fitted.fingerprint, fitted.tensors, {}, {"layers": [places] * fitted.fingerprint.geometry.layers}
    )
    model = rate._Model(counted)
    assert model.bits(0) == pytest.approx(1.0 + model.fixed, abs=0.01)
    assert model.bits(0) > model.bits(8) > model.bits(24)


def test_requests_of_one_factor_are_one_recipe(fitted):
    """So that they share a set, whatever type a number has, and however near it is."""
    made = rate.coarser(fitted, 1.09)
    given = float(made.recipe.name.partition("bits=")[2])
    assert abs(given - 1.09) < 0.03
    assert rate.coarser(fitted, given).recipe == rate.coarser(fitted, 1.0901).recipe == made.recipe
    whole = [rate.coarser(fitted, bits).recipe.to_json() for bits in (torch.tensor(1.09), 1.09)]
    assert strict_json.dumps(whole[0]) == strict_json.dumps(whole[1])


def test_what_a_rate_was_found_by_is_not_held(fitted):
    made = Artifact(fitted.recipe, fitted.fingerprint, Fitted(fitted.tensors), {}, {})
    rate.coarser(made, 1.09)
    assert not made.tensors._built  # type: ignore[attr-defined]


@pytest.mark.parametrize("odd", [[1], "no", [{"key": 3}], [{"key": {"coded_bits": "x"}}], [{"key": {"coded_bits": -1}}],
                                 [{"key": {"coded_bits": float("nan")}}], [{"key": {"coded_bits": True}}]])  # fmt: skip
def test_a_fit_that_counted_nonsense_is_as_one_that_counted_nothing(fitted, odd):
    made = Artifact(fitted.recipe, fitted.fingerprint, fitted.tensors, {}, {"layers": odd})
    plain = Artifact(fitted.recipe, fitted.fingerprint, fitted.tensors, {}, {})
    assert rate._Model(made).bits(5) == rate._Model(plain).bits(5)


def test_bits_that_no_step_gives_are_refused(fitted):
    assert rate.coarser(fitted, 1.0) is fitted  # those of its name
    for bits in (0.3, 2.5):
        with pytest.raises(ValueError, match=rf"bits={bits}; of rest-1bit .* rest-1bit\+all.quantize.target={bits}$"):
            rate.coarser(fitted, bits)
    with pytest.raises(ValueError, match="bits=1; files of aqua-2bit have no rate to set"):
        rate.coarser(artifact.load(GOLDEN / "aqua-2bit.safetensors"), 1)
