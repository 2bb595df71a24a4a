"""Convert a GGUF file, once, into a folder of safetensors that every other module reads as any model's.

transformers' own loader dequantizes the weights. The folder lies in $KVQ_HOME/gguf, named by the file's sha256.

Differs from the loader: refuses a file of which it would read something else than llama.cpp does (scaled RoPE, parts,
tensors that are missing, keys for which it has other defaults), and splits text and adds BOS as llama.cpp does.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Mapping
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
GUESSED = "text_split_guessed"  # in a config.json: nothing says how the tokenizer splits text before it merges
# by `tokenizer.ggml.pre`: digits are tokens of their own; text is split as GPT-2's; texts begin with BOS, and whole
# words of the vocabulary need no merges
DIGITS, GPT2 = ("smollm",), ("gpt-2", "phi-2", "mpt", "olmo")
WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
TOKENIZERS = {"gemma3": "gemma3_text"}  # {architecture: its tokenizer's type}, where transformers would search for it
INSTEAD = "use the model in Hugging Face format"
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
    _settle(path, values, model.config)
    quantized = [kind for kind, _ in kinds.most_common() if kind not in DTYPES]
    if quantized:
        setattr(model.config, DEQUANTIZED, ", ".join(quantized))
    if tokenizer.chat_template is None:
        tokenizer.chat_template = values.get("tokenizer.chat_template")
    if values["tokenizer.ggml.model"] == "gpt2" and not _set_split(tokenizer, values):
        setattr(model.config, GUESSED, True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    said = {name.replace(".", "_"): values[f"general.{name}"] for name in LICENSE if f"general.{name}" in values}
    lines = [f"{name}: {value}" for name, value in said.items()]
    (folder / "README.md").write_text("\n".join(["---", *lines, "---", f"{path.name}, written out.\n"]))


def _set_split(tokenizer: Any, values: Mapping[str, Any]) -> bool:
    """Split text before merges as `tokenizer.ggml.pre` says, else as the architecture's own tokenizer does.

    Return False if neither says how: the text is then split as GPT-2's.
    """
    pre, backend = values.get("tokenizer.ggml.pre", "default"), tokenizer.backend_tokenizer
    if pre in WORDS:
        backend.model.ignore_merges = True
        tokenizer.add_bos_token = values.get("tokenizer.ggml.add_bos_token", True)
    if pre in DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    elif pre == "default" and type(tokenizer).__name__.startswith("Qwen"):
        backend.pre_tokenizer = type(tokenizer)().backend_tokenizer.pre_tokenizer
    return pre in GPT2 or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)  # the loader's own default


def _settle(path: Path, values: Mapping[str, Any], config: Any) -> None:
    """Take what a file leaves out as llama.cpp does: RoPE's base, 10,000; the scale of scores of Gemma 2's largest."""
    if config.model_type == "gemma2" and config.num_hidden_layers == 46:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    base = rope.get("full_attention", rope)["rope_theta"]
    given = values.get(f"{values['general.architecture']}.rope.freq_base", 10_000.0)
    if base != given:
        raise ValueError(f"{path}: RoPE's base is {given:g}, and transformers reads {base:g}; {INSTEAD}")


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
    kind, factor = (values.get(f"{name}.rope.{key}") for key in ("scaling.type", "scaling.factor"))
    factor = values.get(f"{name}.rope.scale_linear", 1.0) if factor is None else factor
    scaled = factor not in (0.0, 1.0) if kind is None else kind != "none"  # llama.cpp's default is linear
    if scaled or any(tensor.startswith("rope_f") for tensor in names):
        raise ValueError(f"{path} scales RoPE, which transformers' GGUF loader does not read; {INSTEAD}")
    if not kinds:
        raise ValueError(f"{path} has no layers; give the file of a whole model")
    needed = [f"{name}.attention.layer_norm_rms_epsilon", "tokenizer.ggml.eos_token_id"]
    needed += [f"{name}.attention.sliding_window"] * name.startswith("gemma")
    starts = values.get("tokenizer.ggml.model") == "llama" or values.get("tokenizer.ggml.pre") in WORDS
    needed += ["tokenizer.ggml.bos_token_id"] * starts
    if missing := [key for key in needed if key not in values]:
        raise ValueError(f"{path} lacks {missing[0]}, which transformers' GGUF loader would make up; {INSTEAD}")
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
