"""A tile of tokens that the attention kernel reads is what the stage decodes, for any head and levels."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false

import pytest
import torch
from parity import DEVICE, error

pytest.importorskip("triton")
import triton
import triton.language as tl

from kvq_runtime.geometry import Geometry
from kvq_runtime.kernels.attend import polar
from kvq_runtime.kernels.attend.launch import Layout, block_table, constants, layout
from kvq_runtime.recipe import Scheme
from kvq_runtime.stages.polar import Polar, PolarFitted

TOLERANCE = 1.5e-3  # products of float16
TOKENS = 24


@triton.jit
def _read(p_table, p_lookup, p_out, p_scale, i_h, L: tl.constexpr, S: tl.constexpr):
    o_t, o_c = tl.arange(0, 32), tl.arange(0, S.P)
    m_t = o_t < L.T
    b_tiles, b_numbers = polar.read_angles(p_table, p_lookup, 0, 1, i_h, o_t, m_t, L, S)
    for slot in tl.static_range(tl.constexpr(S.SLOTS)):
        p = p_out + o_t[:, None] * L.D + slot * S.COLUMNS + o_c[None, :]
        tl.store(p, b_tiles[slot].to(tl.float32), mask=m_t[:, None] & (o_c < S.COLUMNS)[None, :])
    if len(b_numbers) > 0:
        tl.store(p_scale + o_t, b_numbers[0], mask=m_t)


def random_fields(stage: Polar, geometry: Geometry) -> dict[str, torch.Tensor]:
    """Any codes, and radii of any size that they may have."""
    drawn, found = torch.Generator().manual_seed(0), {}
    for name, (shape, dtype) in stage.fields(2 * TOKENS, geometry.width, geometry, torch.float32).items():
        codes = torch.randint(0, 256 if name == "codes" else 64, shape, generator=drawn)
        found[name] = codes.to(dtype) if dtype == torch.uint8 else (torch.rand(shape, generator=drawn) + 0.1).to(dtype)
    return found


def read(made: Layout, fields: dict[str, torch.Tensor], geometry: Geometry) -> torch.Tensor:
    """The second of two batch rows, one block, as the kernel reads it: [T, H, D]."""
    parts = {name: x.view(2, 1, TOKENS, *x.shape[1:]).to(DEVICE) for name, x in fields.items()}
    addresses = block_table([parts], made.names, 1, torch.device(DEVICE))
    layer = constants(made, made, 0)[0]
    found = []
    for head in range(geometry.kv_heads):
        out = torch.full((TOKENS, geometry.head_size), float("nan"), device=DEVICE)
        scale = torch.ones(TOKENS, device=DEVICE)
        assert made.lookup is not None and made.rotation is not None
        _read[(1,)](addresses, made.lookup.to(DEVICE), out, scale, head, layer, made.settings)
        found.append(out * scale[:, None] @ made.rotation.float().to(DEVICE))
    return torch.stack(found, 1).cpu()


def check(stage: Polar, size: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
    geometry = Geometry(layers=1, kv_heads=3, head_size=size)
    scheme = Scheme(stage)
    made, fields = layout(scheme, TOKENS, geometry, "key", tensors=tensors or {}), random_fields(stage, geometry)
    assert made is not None
    wanted = stage.decode({name: x[TOKENS:] for name, x in fields.items()}, geometry.width, geometry, tensors or {})
    assert error(read(made, fields, geometry), wanted.view(TOKENS, 3, size)) < TOLERANCE


@pytest.mark.parametrize("size, levels", [(16, 4), (32, 0), (32, 2), (64, 4)])
def test_sizes_and_levels(size, levels):
    check(Polar(levels=levels, points="mean" if levels else "unit"), size)


@pytest.mark.parametrize("stage", [Polar((3, 2)), Polar((4, 4)), Polar(radius="log8"), Polar(group="all")], ids=str)
def test_stages_that_no_kernel_reads(stage):
    assert layout(Scheme(stage), TOKENS, Geometry(1, 2, 64), "key") is None


@pytest.mark.parametrize("size", [80, 96, 256])
def test_heads_that_no_kernel_reads(size):
    assert layout(Scheme(Polar()), TOKENS, Geometry(1, 3, size), "key") is None


def test_a_fitted_codebook():
    stage = PolarFitted((4, 2), levels=4)
    geometry = Geometry(1, 3, 32)
    counts = [2**wide for wide in stage.sizes(geometry.width, geometry)[1]]
    drawn = torch.Generator().manual_seed(1)
    check(stage, 32, {"points": torch.rand(sum(counts), 2, generator=drawn) + 0.2})
    made = layout(Scheme(stage), TOKENS, geometry, "key")  # before the codebook is at hand
    assert made is not None and made.lookup is None
