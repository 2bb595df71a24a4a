"""Read a model whose files hold quantized weights: single tensors, dequantized, so that it is calibrated as served.

Which tensors make up a weight W is told from their names:

    fp8, int8, by tensor, row or block    W.weight · W.weight_scale, or weight_scale_inv         w · scale
    int8 of bitsandbytes                  W.weight · W.SCB                                       w · SCB / 127
    integers in words of 32 bits          W.weight_packed · W.weight_scale, .weight_zero_point   (w - zero) · scale
    4 bits of bitsandbytes                W.weight · W.weight.absmax, .quant_map, .quant_state   table[w] · absmax
    mxfp4                                 W_blocks · W_scales                                    e2m1[w] · 2^(s - 127)

Sources: the formats of transformers' fine-grained fp8, of compressed-tensors 0.20 ("float-quantized", "int-quantized",
"pack-quantized"), of bitsandbytes 0.50, and the microscaling formats 1.0 of the Open Compute Project (e2m1, an exponent
by 32 elements).
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_calib.model.files import ModelFiles, Stored
from kvq_runtime.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WORD = 32  # bits
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
PARTS = {  # what a tensor's name ends with: what the weight's does, and which part of it the tensor is
    ".weight_scale_inv": (".weight", "scale"), ".weight_scale": (".weight", "scale"), ".SCB": (".weight", "scb"),
    ".qscale_weight": (".weight", "scale"), ".scale": (".weight", "scale"), "_scale_inv": ("", "scale"),
    ".weight_packed": (".weight", "packed"), ".weight_zero_point": (".weight", "zero"),
    ".weight_shape": (".weight", "shape"), ".weight.absmax": (".weight", "absmax"),
    ".weight.quant_map": (".weight", "table"), ".weight.nested_absmax": (".weight", "nested_absmax"),
    ".weight.nested_quant_map": (".weight", "nested_table"),
    ".weight.quant_state.bitsandbytes__nf4": (".weight", "state"),
    ".weight.quant_state.bitsandbytes__fp4": (".weight", "state"), "_blocks": ("", "blocks"), "_scales": ("", "scales"),
}  # fmt: skip
BESIDE = (".input_scale", ".k_scale", ".v_scale", ".q_scale", ".weight_format", ".input_global_scale")  # of no weight
FOREIGN = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_g_idx|codes|codebooks|weight_global_scale)$")
FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "bitsandbytes")
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class PackedFiles(ModelFiles):
    """A model in the form of `ModelFiles`, some of whose weights are quantized."""

    @property
    def quantization(self) -> str | None:
        """The method by its name in config.json."""
        given = self.config.get("quantization_config")
        return str(given.get("quant_method")) if isinstance(given, Mapping) else None

    def check_form(self) -> None:
        if self.quantization not in METHODS:
            raise ValueError(
                f"{self.id} has quantized weights, by {self.quantization!s:.60}; kvq reads those by "
                f"{', '.join(METHODS)}: calibrate the 16-bit model it was made from"
            )
        given = self.config["quantization_config"]
        rotated, form = given.get("transform_config"), given.get("format") or "dense"
        if rotated or form not in FORMATS:
            what = "rotated weights" if rotated else f"weights in the form {form!s:.60}"
            raise ValueError(
                f"{self.id} has {what}, which kvq does not read; calibrate the 16-bit model it was made from"
            )

    @cached_property
    def held(self) -> Mapping[str, str]:
        """The file of each weight, or of its codes, by the weight's name."""
        return {name: self._raw.held[parts["weight"]] for name, parts in self._parts.items()}

    @cached_property
    def _raw(self) -> ModelFiles:
        """The same files, tensors by their own names, as they are."""
        return ModelFiles(self.path, self.id, self.revision, self.config, self.headers)

    @cached_property
    def _parts(self) -> Mapping[str, Mapping[str, str]]:
        """{weight: {part: the tensor's own name}}, "weight" that of its codes."""
        found: dict[str, dict[str, str]] = {}
        for name in self._raw.held:
            if FOREIGN.search(name):
                raise ValueError(
                    f"{self.id} has weights quantized by {self.quantization} in a form that kvq does not read "
                    f"({name}); calibrate the 16-bit model it was made from"
                )
            if name.endswith(BESIDE):
                continue
            end = next((end for end in PARTS if name.endswith(end)), "")
            target, part = PARTS.get(end, ("", "weight"))
            found.setdefault(name.removesuffix(end) + target, {})[part] = name
        for name, parts in found.items():
            codes = next((parts[part] for part in ("weight", "packed", "blocks") if part in parts), None)
            if codes is None:
                raise ArtifactError(f"{self.id}: {name} has {', '.join(parts)} and no codes; download it again")
            parts["weight"] = codes
        return found

    def _is_packed(self, name: str) -> bool:
        return len(self._parts.get(name, ())) > 1

    def copied(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        if not self._is_packed(name):
            self._check_plain(name)
            return super().copied(name, device, dtype)
        made = torch.empty(self._stored(name).shape, dtype=dtype, device=device)
        for place, part in self._dequantized(name, self._parts[name]):
            made[place] = part.to(dtype)
        return made

    def tensor(self, name: str) -> Tensor:
        if not self._is_packed(name):
            self._check_plain(name)
            return super().tensor(name)
        return self.copied(name, torch.device("cpu"), torch.bfloat16)

    def _check_plain(self, name: str) -> None:
        """Refuse codes of which no scale is known."""
        kind = super()._stored(name).dtype
        if kind.startswith(("F8", "F4", "I", "U")) and name.endswith(("weight", "proj")):
            raise ValueError(
                f"{self.id} has {name} in {kind} without a scale that kvq knows; calibrate the 16-bit model that it "
                "was made from"
            )

    def place(self, name: str) -> tuple[Path, int, int]:
        return self._raw.place(self._parts.get(name, {"weight": name})["weight"])

    def _dequantized(self, name: str, parts: Mapping[str, str]) -> Iterator[tuple[Any, Tensor]]:
        """A weight piece by piece: where the piece belongs, and what it is, float32."""

        def read(part: str) -> Tensor:
            return self._raw.tensor(parts[part])

        shape = self._stored(name).shape
        try:
            if "blocks" in parts:
                for expert, (codes, exponents) in enumerate(zip(read("blocks"), read("scales"), strict=True)):
                    yield expert, _mxfp4(codes, exponents)
            elif "absmax" in parts:
                yield ..., _four_bits(read, _state(read("state")), parts).view(shape)
            elif "packed" in parts:
                yield ..., _integers(read, parts, shape)
            elif "scb" in parts:
                yield ..., read("weight").float() * (read("scb").float() / 127)[:, None]
            else:
                codes, scale = read("weight").float(), read("scale")
                scale = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()  # exponents
                if "zero" in parts:
                    codes = codes - _wide(read("zero").float(), codes, self._block)
                yield ..., codes * _wide(scale, codes, self._block)
        except (KeyError, RuntimeError, ValueError) as error:
            raise ArtifactError(f"{self.id}: {name} cannot be dequantized: {error}; download it again") from error

    @property
    def _block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, where config.json says it."""
        given = self.config["quantization_config"]
        sizes = [given.get("weight_block_size"), *(one.get("block_structure") for one in _weights(given))]
        found = next((one for one in sizes if isinstance(one, list) and len(one) == 2), None)
        return None if found is None else (found[0], found[1])

    def _stored(self, name: str) -> Stored:
        """The weight as it is read: in bfloat16, of its own shape."""
        if not self._is_packed(name):
            return super()._stored(name)
        parts = self._parts[name]
        codes = self._raw._stored(parts["weight"])
        shape = codes.shape
        if "blocks" in parts:
            experts, rows, groups, size = codes.shape
            shape = experts, groups * size * 2, rows
        elif "absmax" in parts:
            shape = (2 * math.prod(codes.shape),)  # of what has not been downloaded, elements alone
            if self.headers is None:
                shape = tuple(_state(self._raw.tensor(parts["state"]))["shape"])
        elif "packed" in parts:
            if self.headers is None and "shape" in parts:
                shape = tuple(self._raw.tensor(parts["shape"]).tolist())
            else:
                rows, words = codes.shape
                shape = rows, words * WORD // _bits(self.config["quantization_config"])
        return Stored(codes.file, "BF16", shape)

    def transformers_config(self) -> "PreTrainedConfig":
        """That of the model of dequantized weights."""
        config: Any = super().transformers_config()
        for one in (config, config.get_text_config(decoder=True)):
            if hasattr(one, "quantization_config"):
                del one.quantization_config
        return config

    def model(self, dtype: torch.dtype) -> "PreTrainedModel":
        """The whole model of dequantized weights, on the CPU."""
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config: Any = self.transformers_config()
        named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        made: Any = getattr(transformers, named) if named else None
        text = config.get_text_config(decoder=True)
        if made is None or made.config_class not in (type(config), type(text)):
            raise ValueError(
                f"{self.id}: a model of images with quantized weights is measured one layer at a time: --by-layer"
            )
        config = text if made.config_class is type(text) else config
        weights = {name: self.copied(name, torch.device("cpu"), dtype) for name in self.names}
        return made.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)


def _wide(scale: Tensor, codes: Tensor, block: tuple[int, int] | None) -> Tensor:
    """The scale of each of some codes [..., rows, columns], from that of a tensor, of rows, or of blocks."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() < codes.dim():
        scale = scale.reshape(*scale.shape, *[1] * (codes.dim() - scale.dim()))
    for dim in (-2, -1):
        size, count = codes.shape[dim], scale.shape[dim]
        if count not in (1, size):
            declared = block is not None and -(-size // block[dim]) == count
            if not declared and size % count:
                raise ValueError(f"{count} scales of {size} rows or columns, in blocks of {block}")
            wide = block[dim] if block is not None and declared else size // count
            scale = scale.repeat_interleave(wide, dim).narrow(dim, 0, size)
    return scale


def _weights(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The weights' settings in the groups of compressed-tensors."""
    groups = quantization.get("config_groups")
    every = groups.values() if isinstance(groups, dict) else ()
    given = [one.get("weights") for one in every if isinstance(one, Mapping)]
    return [one for one in given if isinstance(one, Mapping)]


def _bits(quantization: Mapping[str, Any]) -> int:
    """Bits of a packed integer, as a group of compressed-tensors says."""
    found = {one.get("num_bits") for one in _weights(quantization)}
    bits = found.pop() if len(found) == 1 else None
    if bits not in (4, 8):
        raise ValueError(f"packed integers of {bits} bits by config.json; kvq reads those of 4, or of 8")
    return int(bits)


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned integers out of words of 32 bits, the lowest bits first, along a dimension."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    words = words.movedim(dim, -1)
    parts = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return parts.flatten(-2).movedim(-1, dim)


def _integers(read: Read, parts: Mapping[str, str], shape: tuple[int, ...]) -> Tensor:
    """Packed integers, signed by half of their range, less the zero point, times the scale of their group."""
    words, scale = read("packed"), read("scale").float()
    if words.dtype != torch.int32:
        raise ValueError(f"codes in {words.dtype}, not in words of 32 bits")
    bits = words.shape[1] * WORD // shape[1]
    half = 1 << (bits - 1)
    codes = _unpacked(words, bits, 1)[:, : shape[1]].float() - half
    groups = scale.reshape(len(scale), -1)
    if "zero" in parts:
        zero = read("zero")
        if zero.dtype == torch.int32 and zero.shape != groups.shape:
            zero = _unpacked(zero, bits, 0)[: len(groups)] - half
        zero = zero.reshape(groups.shape).float().repeat_interleave(shape[1] // groups.shape[1], 1)
        codes = codes - zero
    return codes * groups.repeat_interleave(shape[1] // groups.shape[1], 1)


def _mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Bytes of two codes [rows, groups, 16], the lower half first, and a power of two by group: [columns, rows]."""
    table = torch.tensor(E2M1)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return torch.ldexp(table[codes], exponents.int()[..., None] - 127).flatten(-2).T


def _state(bytes_N: Tensor) -> dict[str, Any]:
    return json.loads(bytes(bytes_N.tolist()))


def _four_bits(read: Read, state: Mapping[str, Any], parts: Mapping[str, str]) -> Tensor:
    """bitsandbytes' codes, the upper half of a byte first: an entry of a table times the largest of its block."""
    packed, absmax = read("weight").flatten(), read("absmax")
    if "nested_absmax" in parts:
        coarse = read("nested_absmax").repeat_interleave(state["nested_blocksize"])[: absmax.numel()]
        absmax = read("nested_table")[absmax.long()] * coarse + state["nested_offset"]
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten()[: math.prod(state["shape"])]
    return read("table").float()[codes.long()] * absmax.float().repeat_interleave(state["blocksize"])[: codes.numel()]
