"""Attend to predicted layers without rebuilding them: a query reads the residuals of its layer and of those underneath.

Where decoded keys after RoPE are a linear map of those below, decoding is linear along the chain of layers. Of a token
at position t, with the mean μ, which RoPE turns by R_t, and the residual r, which is what blocks hold:

    k_l = R_t μ + z_l,   z_l = Σ_d z_{l-d} W_d + b + r_l     W_d: prediction from the layer d below, [C, C]
    q · k_l    = q · R_t μ + q · b + q · r_l + Σ_d (q W_dᵀ) · z_{l-d}         and so on, down to the anchor
    Σ_t p_t v_l = μ Σp + b Σp + Σ_t p_t r_l + Σ_d (Σ_t p_t z_{l-d}) W_d

So the query goes down the chain once, and the sums of values come up it once. Only two products grow with the tokens:
of queries and of weights p with each layer's residuals, which stay packed where their codes can be read so. q · R_t μ
is a sum over the K frequencies of RoPE, for which no key is made either.

A query of one head meets all C channels of a layer below, as in multi-head latent attention: 4 · tokens · query heads
· C operations for keys and values both, where rebuilding takes 4 · tokens · C² a layer, whatever the queries.

Y = B · H rows of heads · N queries per head · M = H · N · S tokens of a run.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvq_runtime.attention.path import Attended, Observer, Query, Reference
from kvq_runtime.codec.codec import Codec
from kvq_runtime.codec.packed import PackedReader, packed_reader
from kvq_runtime.geometry import ROLES, Geometry, Role
from kvq_runtime.ops.constant import lasting
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.abilities import LinearPrediction
from kvq_runtime.store.decode import Decoder
from kvq_runtime.store.layer import LayerStore, Run


def chain(recipe: Recipe, role: Role, layer: int) -> list[int]:
    """The layers whose residuals make the keys, or values, of this one: itself first, then downwards."""
    found, ahead = set(), {layer}
    while ahead:
        one = ahead.pop()
        found.add(one)
        ahead |= {one - depth for depth in recipe.scheme(one, role).inputs(one, role).below} - found
    return sorted(found, reverse=True)


def bits_read(recipe: Recipe, geometry: Geometry) -> float:
    """Bits of packed residuals read per element of keys and values and decode step, on average over the layers."""
    block, bits = recipe.window.block, 0.0
    for site in recipe.sites(geometry):
        read = chain(recipe, site.role, site.layer)
        bits += sum(recipe.scheme(one, site.role).bits(block, geometry) for one in read)
    return bits / (2 * geometry.layers)


def reads(recipe: Recipe, geometry: Geometry) -> str | None:
    """Say what a decode step reads where every layer can be attended to without rebuilding; None for other recipes."""
    if any(refusal(recipe, layer) is not None for layer in range(geometry.layers)):
        return None
    bits = bits_read(recipe, geometry)
    return (
        f"packed residuals of a layer and of those below it, by torch; {bits:.3f} bits per element of keys and values"
    )


def refusal(recipe: Recipe, layer: int) -> str | None:
    """Return the reason for rebuilding this layer before attention; None: residuals are read."""
    if not recipe.cross_layer:
        return "no layer is predicted from another"
    if recipe.position == "pre":
        return 'keys are predicted before RoPE, which comes between query and prediction; use position "post"'
    for role in ROLES:
        for one in chain(recipe, role, layer):
            scheme = recipe.scheme(one, role)
            predictor, inputs = scheme.predictor(one, role), scheme.inputs(one, role)
            if inputs.keys or inputs.both:
                return f"its {role}s are predicted from keys and values; use keys=false and both=false"
            if predictor is not None and inputs.tokens and not isinstance(predictor, LinearPrediction):
                return f"its {role}s are predicted by {predictor.kind}, which is not linear"
    return None


class Absorbed(Reference):
    """For the layers of recipes that predict linearly, keys after RoPE from keys and values from values; few queries.

    observer   takes the weights, as in `Reference`
    any        whether there are such layers
    """

    def __init__(self, decoder: Decoder, observer: Observer | None = None):
        super().__init__(decoder, observer)
        recipe, layers = decoder.recipe, range(decoder.geometry.layers)
        self._taken = [refusal(recipe, layer) is None for layer in layers]
        self.any = any(self._taken)
        self._chains = [{role: chain(recipe, role, layer) for role in ROLES} for layer in layers]
        self._readers: dict[tuple[int, int, torch.device], PackedReader | None] = {}

    def __getstate__(self) -> dict:
        """Without the readers, which are made again."""
        return self.__dict__ | {"_readers": {}}

    @property
    def shared(self) -> list[Tensor]:
        """Rotations that the readers hold."""
        return [reader.turn for reader in self._readers.values() if reader is not None and reader.turn is not None]

    def takes(self, layer: int, q_BHTD: Tensor) -> bool:
        """True if reading the residuals below takes no more operations than rebuilding.

        That is, if rows of queries times layers below are at most the channels.
        """
        if not self._taken[layer]:
            return False
        below = max(len(layers) for layers in self._chains[layer].values()) - 1
        return q_BHTD.shape[1] * q_BHTD.shape[2] * below <= self.decoder.geometry.width

    def attend(self, query: Query) -> Attended | None:
        """As `Path.attend`."""
        watch = query.store.watch
        exact = watch is not None and any(watch.exact)
        return super().attend(query) if self.takes(query.store.layer, query.q_BHTD) and not exact else None

    def _scores(self, store: LayerStore, q_YND: Tensor, hidden: int) -> Tensor:
        """q · k by column: [Y, N, X]."""
        if not store.blocks:
            return super()._scores(store, q_YND, hidden)
        wide_BMC = _wide(q_YND, self._heads)
        below, bias_BM1 = self._lowered(store.layer, wide_BMC)
        parts = []
        for run in store.runs():
            first = 0 if run[0] else hidden
            s_BMS = bias_BM1 + self._of_mean(store, q_YND, run, first)
            for one, q_BMC in below.items():
                s_BMS = s_BMS + self._residual_scores(one, q_BMC, run, first)
            parts.append(s_BMS.view(*q_YND.shape[:2], -1))
        return torch.cat([*parts, torch.bmm(q_YND, store.exact_YTD(0).mT)], -1)

    def _mix(self, store: LayerStore, p_YNX: Tensor, hidden: int) -> Tensor:
        """The sum of values with the weights of their columns: [Y, N, D]."""
        if not store.blocks:
            return super()._mix(store, p_YNX, hidden)
        first, *rest = store.sizes
        sizes = [first - hidden, *rest, p_YNX.shape[2] - store.encoded + hidden]
        *parts, exact = p_YNX.split_with_sizes(sizes, -1)
        sums: dict[int, Tensor] = {}
        for run, p_YNS in zip(store.runs(), parts, strict=True):
            p_BMS = p_YNS.reshape(store.rows, -1, p_YNS.shape[2])
            for one in self._chains[store.layer]["value"]:
                x_BMC = self._residual_sum(one, p_BMS, run, 0 if run[0] else hidden)
                sums[one] = x_BMC if one not in sums else sums[one].add_(x_BMC)
        total_YN1 = sum(part.sum(-1, True) for part in parts)
        assert isinstance(total_YN1, Tensor)
        mixed_YND = _own(
            self._raised(store.layer, sums, total_YN1.view(store.rows, -1, 1)), self._heads, p_YNX.shape[1]
        )
        codec = self._codec(store.layer, 1)
        if codec.predictor is not None:
            mean_HD = codec.centre.view(self._heads, -1)
            mixed_YND = mixed_YND + total_YN1 * mean_HD.repeat(store.rows, 1)[:, None]
        return torch.baddbmm(mixed_YND, exact, store.exact_YTD(1))

    def _lowered(self, layer: int, q_BMC: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """Return the queries of each layer's residuals, and what the biases add to every score, [B, M, 1]."""
        found, bias_BM1 = {layer: q_BMC}, torch.zeros_like(q_BMC[..., :1])
        for one in self._chains[layer]["key"]:  # downwards: all that reads a layer comes before it
            codec = self._codec(one, 0)
            if not codec.below:
                continue
            weight_IC, bias_C = codec.affine()
            bias_BM1 = bias_BM1 + found[one] @ bias_C[:, None]
            for depth, weight_CC in zip(codec.below, weight_IC.split(len(bias_C)), strict=True):
                lowered = found[one] @ weight_CC.mT
                found[one - depth] = found[one - depth] + lowered if one - depth in found else lowered
        return found, bias_BM1

    def _raised(self, layer: int, sums: dict[int, Tensor], total_BM1: Tensor) -> Tensor:
        """The sum of a layer's centred values from those of its chain: [B, M, C]."""
        found: dict[int, Tensor] = {}
        for one in reversed(self._chains[layer]["value"]):
            codec = self._codec(one, 1)
            found[one] = sums[one]
            if codec.below:
                weight_IC, bias_C = codec.affine()
                inputs_BMI = torch.cat([found[one - depth] for depth in codec.below], -1)
                found[one] = found[one] + inputs_BMI @ weight_IC + total_BM1 * bias_C
        return found[layer]

    def _of_mean(self, store: LayerStore, q_YND: Tensor, run: Run, first: int) -> Tensor:
        """q · R_t μ for the tokens of a run from the place `first` on: [B, M, S], or 0 where no mean was removed."""
        codec = self._codec(store.layer, 0)
        start, stop = store.tokens(run)
        if codec.predictor is None:
            return q_YND.new_zeros(store.rows, self._heads * q_YND.shape[1], stop - start - first)
        cos_BSK, sin_BSK = (table.float() for table in self.positions.rope(start + first, stop))
        half = cos_BSK.shape[-1]
        q_BHND = q_YND.view(store.rows, self._heads, *q_YND.shape[1:])
        mean_H1D = codec.centre.view(self._heads, 1, -1)
        (a, b, rest), (u, v, still) = (x.tensor_split([half, 2 * half], -1) for x in (q_BHND, mean_H1D))
        along, across = (x.flatten(1, 2) for x in (a * u + b * v, b * u - a * v))
        return along @ cos_BSK.mT + across @ sin_BSK.mT + (rest * still).sum(-1, True).flatten(1, 2)

    def _residual_scores(self, layer: int, q_BMC: Tensor, run: Run, first: int) -> Tensor:
        """q · r for the residuals of one layer's keys: [B, M, S]."""
        reader, fields = self._reader(layer, 0), self.decoder.stores[layer].fields(0, *run)
        if reader is not None:
            return reader.scores(q_BMC, reader.view_blocks(fields, first))
        return q_BMC @ self._residual(layer, 0, fields, first).mT

    def _residual_sum(self, layer: int, p_BMS: Tensor, run: Run, first: int) -> Tensor:
        """Σ p r for the residuals of one layer's values: [B, M, C]."""
        reader, fields = self._reader(layer, 1), self.decoder.stores[layer].fields(1, *run)
        if reader is not None:
            return reader.mix(p_BMS, reader.view_blocks(fields, first))
        return p_BMS @ self._residual(layer, 1, fields, first)

    def _residual(self, layer: int, role: int, fields: dict[str, Tensor], first: int) -> Tensor:
        """One run of residuals, [B, S, C], decoded for this product alone."""
        rows = len(next(iter(fields.values())))
        flat = {name: field.flatten(0, 1).contiguous() for name, field in fields.items()}
        r_NTC = self._codec(layer, role).decode_residual(flat).float()
        return r_NTC.reshape(rows, -1, r_NTC.shape[-1])[:, first:]

    def _codec(self, layer: int, role: int) -> Codec:
        codec = self.decoder.stores[layer].codecs[role]
        assert isinstance(codec, Codec), "what is predicted from other layers is not fitted to a prompt"
        return codec

    def _reader(self, layer: int, role: int) -> PackedReader | None:
        """Return the reader of a layer's packed residuals for queries of all channels; None: they are decoded."""
        codec = self._codec(layer, role)
        site = layer, role, codec.device
        if site not in self._readers:
            self._readers[site] = _residual_reader(codec)
        return self._readers[site]


@lasting
def _residual_reader(codec: Codec) -> PackedReader | None:
    geometry = codec.geometry
    reader = packed_reader(replace(codec.scheme, predict=None), geometry, codec.back, codec.device)
    return None if reader is None else reader.over_all_heads()


def _wide(q_YND: Tensor, heads: int) -> Tensor:
    """Each head's queries at the channels of its head, zero elsewhere: [B, M, C]."""
    rows, count, size = len(q_YND) // heads, *q_YND.shape[1:]
    wide = q_YND.new_zeros(rows, heads, count, heads, size)
    for head, q_BND in enumerate(q_YND.view(rows, heads, count, size).unbind(1)):
        wide[:, head, :, head] = q_BND
    return wide.view(rows, heads * count, heads * size)


def _own(x_BMC: Tensor, heads: int, count: int) -> Tensor:
    """Return the part of each head's queries, over all channels, that belongs to its own head: [Y, N, D]."""
    by_head = x_BMC.view(len(x_BMC), heads, count, heads, -1)
    return by_head.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
