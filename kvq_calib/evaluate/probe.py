"""Measure what a layer's keys and values can be predicted from, before anything is quantized.

For each layer, keys and values (before RoPE, all heads side by side) are predicted by centred ridge regression from

    L-1, L-2, L-3     the same role of the same token, that many layers below; L-1..3 all three
    L-1 both          keys and values of the layer below
    T-1, T-2, T-3     the same role of that many tokens before, in the same layer; T-1..3 all three
    role              values for keys, keys for values, of the same token and layer
    role + L-1        both: for values, what AQUA-KV reads

and the fit is measured on held-out sequences: explained variance = 1 - Σ|y - ŷ|² / Σ|y - mean(y)|², over all channels.
One Gram matrix of all candidates per layer serves every set of them. The model is streamed once; what later layers read
waits in a temporary folder ($TMPDIR).

Source: Shutova et al., 2025 (AQUA-KV), section 3.1, figures 2, 4 and 5, appendices A and B.
Differs: the ridge is relative to the inputs' mean variance; the first tokens of a sequence, sinks, are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.predict import residual_variance, ridge_map
from kvq_calib.fit.statistics import Centred, CrossMoments
from kvq_calib.model.files import ModelFiles
from kvq_calib.model.streamed import Stream
from kvq_calib.run import checkpoint
from kvq_calib.run.plan import CHUNK_TOKENS, environment
from kvq_calib.text import corpus
from kvq_runtime.recipe import ROLES

DEPTH = 3  # layers below, and tokens before
SKIP = 4  # tokens at the start of a sequence that are not counted

Place = tuple[str, int]  # a role, and how far away it is


@dataclass(frozen=True)
class Settings:
    """The text of a probe: `samples` sequences of the corpus' fit part, `held_out` ones of its held-out part."""

    source: str
    samples: int
    held_out: int
    length: int
    seed: int = 0
    ridge: float = 1e-3

    def work(self, files: ModelFiles) -> int:
        """Return the tokens that `probe` reports to `progress`, in all."""
        return (self.samples + self.held_out) * self.length * files.geometry.layers


def settings(
    files: ModelFiles, source: str | None, samples: int | None, held_out: int | None, length: int | None, seed: int
) -> Settings:
    """Complete settings with the model's defaults, of whose sequences one in eight is held out, as in the paper."""
    length = length or min(files.entry.seq_len, files.context)
    if not SKIP < length <= files.context:
        raise ValueError(f"length {length}; {files.id} takes sequences of {SKIP + 1} to {files.context} tokens")
    held_out = held_out or max(1, files.entry.samples // 8)
    samples = samples or max(1, files.entry.samples - files.entry.samples // 8)
    return Settings(corpus.pin(source or files.entry.corpus), samples, held_out, length, seed)


def probe(
    files: ModelFiles,
    given: Settings,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Any]:
    """Explained variances as JSON; "rows" holds {"layer", "target", "source", "explained"} for every pair."""
    fit = corpus.select(given.source, files.path, given.samples, given.length, given.seed)
    held = corpus.select(given.source, files.path, given.held_out, given.length, given.seed, "held-out")
    stream = Stream(files, device, dtype)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="kvq-probe-") as folder, torch.inference_mode():
        parts = [_Part(batch.tokens_BT, stream, Path(folder) / name) for batch, name in ((fit, "fit"), (held, "held"))]
        for layer in range(stream.layers):
            for part in parts:
                part.run(layer, progress)
            rows += _rows(layer, parts[0].value(), parts[1].value(), given.ridge)
    kind = str(stream.dtype).removeprefix("torch.")
    return {
        "model": files.about,
        "settings": asdict(given) | {"text": fit.description, "held_out_text": held.description},
        "environment": environment(device, kind, torch.get_num_threads()),
        "rows": rows,
    }


@dataclass
class _Part:
    """The sequences that are fitted on, or those held out: their files, and the sums of the layer at work."""

    tokens_BT: Tensor
    stream: Stream
    folder: Path
    sums: dict[str, CrossMoments] = field(default_factory=dict)

    def __post_init__(self):
        self.folder.mkdir()
        rows = max(1, CHUNK_TOKENS // self.tokens_BT.shape[1])
        self.chunks = list(self.tokens_BT.split(rows))
        for index, tokens in enumerate(self.chunks):
            checkpoint.save({"hidden": self.stream.embed(tokens).cpu()}, self._file("hidden", index))

    def _file(self, kind: str | int, index: int) -> Path:
        return self.folder / f"{kind}-{index}.safetensors"

    def run(self, layer: int, progress: Callable[[int], object]) -> None:
        """Run one layer over all chunks, and sum the products of its targets and their candidates."""
        self.sums = {}
        module, device = self.stream.layer(layer), str(self.stream.device)
        for index, tokens in enumerate(self.chunks):
            found = module.forward(checkpoint.load(self._file("hidden", index), device)["hidden"])
            checkpoint.save({"hidden": found.h_BTE.cpu()}, self._file("hidden", index))
            own = {"key": found.k_NTC, "value": found.v_NTC}
            below = [checkpoint.load(self._file(layer - d, index), device) for d in range(1, min(DEPTH, layer) + 1)]
            same = torch.cat([level[role] for level in [own, *below] for role in ROLES], -1)
            self._add("same", same[:, SKIP:])
            for role in ROLES:
                lagged = [own[role][:, SKIP - lag : own[role].shape[1] - lag] for lag in range(DEPTH + 1)]
                self._add(role, torch.cat(lagged, -1))
            checkpoint.save({role: x.cpu() for role, x in own.items()}, self._file(layer, index))
            self._file(layer - DEPTH, index).unlink(missing_ok=True)
            progress(tokens.numel())

    def _add(self, name: str, x_NTI: Tensor) -> None:
        if name not in self.sums:
            self.sums[name] = CrossMoments(x_NTI[0].float().mean(0), x_NTI.new_zeros(0))
        self.sums[name].update(x_NTI, x_NTI[..., :0])

    def value(self) -> dict[str, Centred]:
        """Means and covariances of all candidates: "same" token, and each role with its earlier tokens."""
        return {name: total.value() for name, total in self.sums.items()}


def candidates(role: str, layer: int) -> dict[str, tuple[str, list[Place]]]:
    """The sets of inputs for one role of one layer: {name: (which Gram matrix, places)}."""
    other = ROLES[1 - ROLES.index(role)]  # type: ignore[arg-type]
    below = [(role, depth) for depth in range(1, min(DEPTH, layer) + 1)]
    found = {f"L-{place[1]}": ("same", [place]) for place in below}
    if layer >= DEPTH:
        found[f"L-1..{DEPTH}"] = ("same", below)
    if layer:
        found["L-1 both"] = ("same", [(role, 1), (other, 1)])
    found["role"] = ("same", [(other, 0)])
    if layer:
        found["role + L-1"] = ("same", [(other, 0), (role, 1)])
    earlier = [(role, lag) for lag in range(1, DEPTH + 1)]
    found |= {f"T-{place[1]}": (role, [place]) for place in earlier}
    return found | {f"T-1..{DEPTH}": (role, earlier)}


def _rows(layer: int, fit: Mapping[str, Centred], held: Mapping[str, Centred], ridge: float) -> list[dict[str, Any]]:
    width = len(fit["key"].mean_x_I) // (DEPTH + 1)
    rows = []
    for role in ROLES:
        for name, (which, places) in candidates(role, layer).items():
            inputs = torch.cat([_columns(which, place, width) for place in places])
            target = _columns(which, (role, 0), width)
            share = explained(*(_joint(total[which], inputs, target) for total in (fit, held)), ridge=ridge)
            rows.append({"layer": layer, "target": role, "source": name, "explained": share})
    return rows


def _columns(which: str, place: Place, width: int) -> Tensor:
    role, distance = place
    start = distance if which != "same" else len(ROLES) * distance + ROLES.index(role)  # type: ignore[arg-type]
    return torch.arange(start * width, (start + 1) * width)


def _joint(total: Centred, inputs: Tensor, target: Tensor) -> Centred:
    """The moments of these inputs and this target, out of those of all candidates."""
    inputs, target = inputs.to(total.xx_II.device), target.to(total.xx_II.device)
    return Centred(
        count=total.count,
        mean_x_I=total.mean_x_I[inputs],
        mean_y_O=total.mean_x_I[target],
        xx_II=total.xx_II[inputs][:, inputs],
        xy_IO=total.xx_II[inputs][:, target],
        yy_OO=total.xx_II[target][:, target],
    )


def explained(fit: Centred, held: Centred, ridge: float) -> float:
    """The share of held-out variance that a map fitted elsewhere explains: at most 1; below 0, worse than the mean."""
    weight_IO = ridge_map(fit, ridge)
    bias_O = fit.mean_y_O - fit.mean_x_I @ weight_IO
    shift_O = held.mean_y_O - held.mean_x_I @ weight_IO - bias_O
    missed = float(residual_variance(held, weight_IO).sum() + shift_O.square().sum())
    total = float(held.yy_O.sum())
    return 1 - missed / total if total > 0 else 0.0


def means(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Figure 2: a row per source, the mean over the layers that have it."""
    names = {role: f"{role}s" for role in ROLES}
    rows: dict[str, dict[str, Any]] = {}
    for source in candidates("key", DEPTH):
        row = rows.setdefault(source, {"source": source})
        for role in ROLES:
            values = [r["explained"] for r in found["rows"] if (r["target"], r["source"]) == (role, source)]
            row[names[role]] = sum(values) / len(values) if values else None
    return list(rows.values())


def by_layer(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Figure 5: a row per role and layer, a column per source."""
    rows: dict[tuple, dict[str, Any]] = {}
    order = {role: number for number, role in enumerate(ROLES)}
    for row in sorted(found["rows"], key=lambda r: (order[r["target"]], r["layer"])):
        line = rows.setdefault((row["target"], row["layer"]), {"target": row["target"], "layer": row["layer"]})
        line |= dict.fromkeys(candidates("key", DEPTH)) if len(line) == 2 else {}
        line[row["source"]] = row["explained"]
    return list(rows.values())
