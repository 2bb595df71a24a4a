"""Attention over packed latents, a basis a head, gives what softmax gives on the decoded blocks."""

from dataclasses import dataclass, replace

import pytest
import torch
from fused_driver import PADDED, Driver
from parity import DEVICE, error, normal, poisoned
from tiers import some
from torch import Tensor

from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops import dispatch, latent, pack, rope
from kvq_runtime.recipe import Role, Scheme, Window, preset
from kvq_runtime.stages.latent import Mixed, flat
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis, GradientBasis

pytest.importorskip("triton")
from kvq_runtime.kernels.attend.launch import Exact, Layout, RopeTables, attend, block_table, layout

TOLERANCE = {torch.float32: 1.5e-3, torch.bfloat16: 8e-3}  # as test_attention_kernel.py has them
T = 128


@dataclass(frozen=True)
class Case:
    """One layer's cache and a query. `keys`, `values`: slabs of 16 latents of a head, of 7, 6, ... 1 bits."""

    keys: tuple[int, ...] = (0, 1, 0, 0, 1, 0, 0)
    values: tuple[int, ...] = (0, 0, 0, 1, 0, 1, 0)
    size: int = 32
    heads: int = 1
    ratio: int = 2
    tokens: int = 1
    blocks: int = 1
    window: int = 9
    splits: int = 2
    segment: int = 32
    gain: int = 3
    mean: bool = True
    starts: tuple[int, ...] = (0,)
    sinks: int = 4
    scaling: float = 1.0
    cap: float | None = None
    matrix: str = "dual"
    dtype: torch.dtype = torch.float32

    @property
    def geometry(self) -> Geometry:
        return Geometry(1, self.heads, self.size)

    def scheme(self, role: Role) -> Scheme:
        slabs = self.keys if role == "key" else self.values
        counts = [16 * self.heads * count for count in slabs]
        counts.append(self.heads * self.size - sum(counts))
        gains = {"gain": self.gain, "gains": "head"} if self.gain else {}
        quantize = Mixed(counts=tuple(counts), codebook="stepped", slab=16, **gains)
        rotate = GradientBasis("head") if self.matrix == "dual" else Basis("head")
        return Scheme(quantize, rotate=rotate, predict=Mean() if self.mean else None)

    def positions(self, slots: Tensor) -> Tensor:
        """Of slots of each row, [B, slots]."""
        return slots[None] - torch.tensor(self.starts, device=DEVICE)[:, None]

    @property
    def frequencies(self) -> Tensor:
        return 10000.0 ** (-torch.arange(0, self.size, 2, device=DEVICE) / self.size)

    def turned(self, x_BTHD: Tensor, positions_BT: Tensor) -> Tensor:
        angles = positions_BT[..., None].double() * self.frequencies
        return rope.rotate(x_BTHD.double(), self.scaling * angles.cos(), self.scaling * angles.sin())


def fitted(case: Case, role: Role) -> dict[str, Tensor]:
    """Tensors as a fit leaves them, at random."""
    seed, heads = 20 * ROLES.index(role), case.heads
    stored = case.scheme(role).quantize.stored(case.geometry.width)
    by_head = (heads, stored // heads) if case.gain else (stored,)
    ends = torch.tensor([-1.0, 0.8], device=DEVICE) + 0.1 * normal(heads, 1, seed=seed + 1)
    return {
        case.matrix: (normal(heads, case.size, stored // heads, seed=seed + 2) * (heads / stored) ** 0.5).bfloat16(),
        "deviation": 0.2 + normal(*by_head, seed=seed + 3).abs(),
        "gain_ends": ends if heads > 1 else ends[0],
    }


def decoded(case: Case, role: Role, fields: dict[str, Tensor], tensors: dict[str, Tensor]) -> Tensor:
    """What blocks stand for, their mean aside, and keys before they are turned: float64 [B, tokens, H, D]."""
    codes, start, parts = fields["codes"], 0, []
    for count, bits in case.scheme(role).quantize.runs(case.geometry.width):
        size = count * T * bits // 8
        code = pack.unpack(codes[..., start : start + size].unflatten(-1, (count, -1)), bits, T)
        start += size
        if bits < latent.STEPPED:
            parts.append(latent.gaussian(bits)[1].to(DEVICE)[code.int()])
        else:
            parts.append((code.double() - (2**bits - 1) / 2) * latent.step(bits)[0])
    z_BNRHT = (torch.cat(parts, 2) * flat(tensors["deviation"])[:, None]).unflatten(2, (-1, case.heads))
    if case.gain:
        ends = tensors["gain_ends"].view(case.heads, 2)
        rows = pack.unpack(fields["gain"].view(*codes.shape[:2], case.heads, -1), case.gain, T)
        gains = [latent.gains(ends[head], case.gain)[rows[:, :, head].int()] for head in range(case.heads)]
        z_BNRHT = z_BNRHT * torch.stack(gains, 2)[:, :, None]
    return torch.einsum("bnrht,hdr->bnthd", z_BNRHT, tensors[case.matrix].double()).flatten(1, 2)


def read(case: Case, role: Role) -> tuple[Layout, Tensor, list]:
    """Random blocks of one side, the layout by which the kernel finds them, and what they stand for."""
    scheme, tensors, segment = case.scheme(role), fitted(case, role), case.segment if role == "key" else 0
    generator = torch.Generator().manual_seed(ROLES.index(role))
    fields = {
        name: torch.randint(256, (len(case.starts), case.blocks, *shape), dtype=dtype, generator=generator).to(DEVICE)
        for name, (shape, dtype) in scheme.fields(T, case.geometry, torch.float32).items()
    }
    shape = layout(scheme, T, case.geometry, role, tensors, segment)
    assert shape is not None and shape.order is not None
    slab = shape.order.arranged(fields)
    assert all(torch.equal(x, fields[name]) for name, x in shape.order.collected(slab).items())
    assert {name: x.nbytes for name, x in slab.items()} == {name: x.nbytes for name, x in fields.items()}
    slab = {name: torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, 1), value=77) for name, x in slab.items()}
    shape = replace(shape.on(torch.device(DEVICE)), addresses=block_table([slab], shape.names, 1, torch.device(DEVICE)))
    return shape, decoded(case, role, fields, tensors), [slab]


def run(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, log-sum-exp) of the kernel and of softmax in float64."""
    batch, width, coded = len(case.starts), case.geometry.width, case.blocks * T
    slots = torch.arange(coded, device=DEVICE)
    query = normal(batch, case.heads * case.ratio, case.tokens, case.size, seed=7).to(case.dtype)
    layouts, alive, exact, whole = [], [], [], []
    for role in ROLES:
        shape, x, slab = read(case, role)
        if role == "key":
            x = case.turned(x, case.positions(slots // case.segment * case.segment + case.segment // 2))
        if case.mean:
            mean_HD = normal(case.heads, case.size, seed=50 + ROLES.index(role))
            shape = replace(shape, mean=mean_HD.flatten())
            given = mean_HD.double().expand_as(x)
            x = x + (case.turned(given, case.positions(slots)) if role == "key" else given)
        kept, window = (normal(batch, count, width, seed=60 + ROLES.index(role) + count).to(case.dtype)
                        for count in (case.sinks, case.window))  # fmt: skip
        for row, start in enumerate(case.starts):
            count = max(0, min(case.sinks, coded - start))
            x[row, start : start + count] = kept[row, :count].double().unflatten(1, (case.heads, -1))
        whole.append(torch.cat([x, window.double().unflatten(2, (case.heads, -1))], 1))
        exact.append((torch.nn.functional.pad(window, (0, 0, 3, 2), value=float("nan")), kept))
        layouts.append(shape)
        alive.append(slab)
    starts = torch.tensor(case.starts, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([case.blocks, 3, case.window], dtype=torch.int32, device=DEVICE)
    tables = RopeTables.of(case.frequencies, case.scaling, T, case.blocks + 1, starts, case.segment)
    held = Exact(exact[0][0], exact[1][0], exact[0][1], exact[1][1])
    out, level = attend(query, *layouts, held, lengths, starts, case.size**-0.5, case.splits, tables, case.cap)
    k, v = (x.repeat_interleave(case.ratio, 2).transpose(1, 2) for x in whole)
    s = query.double() @ k.mT * case.size**-0.5
    s = s if case.cap is None else case.cap * torch.tanh(s / case.cap)
    every = torch.arange(k.shape[2], device=DEVICE)
    last = len(every) - case.tokens + torch.arange(case.tokens, device=DEVICE)
    seen = (every >= starts[:, None, None, None]) & (every[None] <= last[:, None])
    s = s.masked_fill(~seen, float("-inf"))
    return out, level, s.softmax(-1) @ v, s.logsumexp(-1) / torch.log(torch.tensor(2.0))


CASES = {
    "plain": Case(),
    "several heads": Case(heads=2, ratio=1),
    "every width": Case(keys=(1,) * 7, values=(1,) * 7, size=128, ratio=4),
    "heads of 80": Case((0, 0, 0, 2, 1, 2, 0), (0, 0, 0, 1, 0, 4, 0), size=80, ratio=7),
    "heads of 256": Case((1, 0, 0, 0, 8, 7, 0), (0, 0, 0, 0, 0, 15, 1), size=256),
    "several queries": Case(ratio=2, tokens=8),
    "padded": Case(starts=(70, 131), blocks=2, heads=2, ratio=1),
    "padded beyond the blocks": Case(starts=(0, 130), splits=3),
    "no gain, no mean, no sinks": Case(gain=0, mean=False, sinks=0),
    "SVDq's basis": Case(heads=2, ratio=1, matrix="basis"),
    "gains of 4 bits, segments of 128": Case(gain=4, segment=128),
    "segments of 16, scaled RoPE": Case(segment=16, scaling=1.3),
    "capped scores": Case(cap=1.5),
    "splits of several blocks": Case(blocks=3, splits=1),
    "bfloat16": Case(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", some(CASES, "plain", "padded", "no gain, no mean, no sinks"))
def test_latents(name, monkeypatch):
    case = CASES[name]
    with poisoned(monkeypatch):
        out, level, wanted, levels = run(case)
    assert error(out, wanted) <= TOLERANCE[case.dtype]
    assert float((level.double() - levels).abs().max()) <= 0.02


@pytest.mark.parametrize("starts", [pytest.param(None, marks=pytest.mark.slow), PADDED[:1]], ids=["whole", "padded"])
def test_a_cache_reads_latents_as_torch_does(starts):
    """The middle of the first segment is padding."""
    made = preset("fisher-head-2.5bit")
    quantize = replace(made.key.quantize, target=0.0, shared=False, counts=(0, 0, 16, 0, 16, 16, 0, 16))
    schemes = {role: replace(getattr(made, role), quantize=quantize) for role in ROLES}
    with dispatch.forced(True):
        driver = Driver(replace(made, **schemes, window=Window(2, 8, 128)), starts, rows=1)
        driver.step(150, expected=False)
        store = driver.cache.layers[0]
        assert store.index is not None and store.blocks
        driver.check(2)
