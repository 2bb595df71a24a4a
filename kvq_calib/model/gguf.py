"""Convert a GGUF file, once, into a folder of safetensors that every other module reads as any model's.

transformers' own loader dequantizes the weights. The folder lies in $KVQ_HOME/gguf, named by the file's sha256.

Differs from the loader: refuses a file of which it would read something else than llama.cpp does (scaled RoPE, parts,
tensors that are missing), and gives tokenizers of SmolLM the digits that it leaves out.
"""

import hashlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from tqdm import tqdm

from kvq_runtime.artifact.fingerprint import DEQUANTIZED
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, NotFound, extra
from kvq_runtime.families import FAMILIES, refusal
from kvq_runtime.registry.reference import home

PIECE = 1 << 24  # bytes
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DIGITS = ("smollm",)  # by `tokenizer.ggml.pre`: digits are tokens of their own
TOKENIZERS = {"gemma3": "gemma3_text"}  # {architecture: its tokenizer's type}, where transformers would search for it
LICENSE = ("license", "license.name", "license.link")


def is_gguf(path: Path) -> bool:
    """True if a path names a GGUF file."""
    return path.suffix.lower() == ".gguf"


def converted(path: Path) -> Path:
    """Return the folder of a GGUF file's model; convert the file if that was not done before.

    Raises NotFound for no file, ArtifactError for a damaged one, ValueError for a model that is not supported, and
    RuntimeError without the packages of the extra.
    """
    final = home() / "gguf" / _digest(path)
    if final.is_dir():
        return final
    files.make_folder(final.parent)
    with files.lock(final.with_suffix(".lock")):
        if not final.is_dir():
            draft = final.with_suffix(".draft")
            shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
            draft.mkdir()
            convert(path, draft)
            for file in sorted(draft.iterdir()):
                files.sync(file)
            draft.rename(final)
            files.sync(final.parent)
    return final


def convert(path: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a GGUF file's model and tokenizer into a folder.

    dtype   of the weights; None: the file's, bfloat16 where these are quantized
    """
    values, kinds = _header(path)
    if values.get("tokenizer.ggml.model") is None:
        raise ValueError(f"{path} has no tokenizer; convert the whole model, vocabulary included")
    import transformers

    stored = kinds.most_common(1)[0][0]
    dtype = dtype or DTYPES.get(stored, torch.bfloat16)
    given: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
    try:
        known = TOKENIZERS.get(values["general.architecture"])
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **given, tokenizer_type=known)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            path.parent,
            **given,
            dtype=dtype,
            output_loading_info=True,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    except Exception as error:  # what transformers raises has many classes
        raise ValueError(f"{path}: transformers cannot convert it: {' '.join(str(error).split()):.300}") from error
    missing = {*found["missing_keys"], *(one[0] for one in found["mismatched_keys"])}
    if missing:
        raise ValueError(f"{path} lacks {min(missing)}, or has it in another shape; give the file of a whole model")
    quantized = [kind for kind, _ in kinds.most_common() if kind not in DTYPES]
    if quantized:
        setattr(model.config, DEQUANTIZED, ", ".join(quantized))
    model.save_pretrained(folder)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = values.get("tokenizer.chat_template")
    if values.get("tokenizer.ggml.pre") in DIGITS:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    tokenizer.save_pretrained(folder)
    said = {name.replace(".", "_"): values[f"general.{name}"] for name in LICENSE if f"general.{name}" in values}
    lines = [f"{name}: {value}" for name, value in said.items()]
    (folder / "README.md").write_text("\n".join(["---", *lines, "---", f"{path.name}, written out.\n"]))


def _header(path: Path) -> tuple[dict[str, Any], Counter[str]]:
    """Return the settings of a file, and the elements of its matrices in each of ggml's types; refuse others' files."""
    try:
        import accelerate  # noqa: F401  # which transformers' loader needs
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise RuntimeError(f"a GGUF file needs {error.name}: {extra('gguf')}") from error
    try:
        reader = GGUFReader(path)
        short = {name: field for name, field in reader.fields.items() if len(field.data) == 1}
        values = {name: field.contents() for name, field in short.items()}
        kinds = Counter[str]()
        for tensor in reader.tensors:
            if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
                kinds[tensor.tensor_type.name] += int(tensor.n_elements)
        names = {tensor.name for tensor in reader.tensors}
    except Exception as error:  # what the library raises has many classes
        raise ArtifactError(f"{path} is no whole GGUF file ({error!s:.200}); download it again") from error
    name = str(values.get("general.architecture"))
    supported = {kind.partition("_text")[0].replace("_", ""): kind for kind in FAMILIES}
    if name.replace("-", "") not in supported:
        raise ValueError(f"{path}: {refusal({'model_type': name})}")
    if values.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {values['split.count']} parts; join them: llama-gguf-split --merge")
    scaling = values.get(f"{name}.rope.scaling.type", "none")
    if "rope_freqs.weight" in names or (scaling != "none" and name != "gpt-oss"):
        raise ValueError(
            f"{path} scales RoPE, which transformers' GGUF loader does not read; use the model in Hugging Face format"
        )
    if not kinds:
        raise ValueError(f"{path} has no layers; give the file of a whole model")
    return values, kinds


def _digest(path: Path) -> str:
    """Return the sha256 of a file, with a progress bar."""
    if not path.is_file():
        raise NotFound(f"{path}: no such file")
    found = hashlib.sha256()
    with path.open("rb") as file, tqdm(total=path.stat().st_size, unit="B", unit_scale=True, delay=2) as bar:
        bar.set_description(f"sha256 of {path.name}")
        while piece := file.read(PIECE):
            found.update(piece)
            bar.update(len(piece))
    return found.hexdigest()
