"""Small random models of the architectures that docs/models.md lists, and its table."""

import copy
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvq_calib.model.attention import Rows
from kvq_runtime.geometry import ENTRIES, joined
from kvq_runtime.hf.attention import halves, pooled
from kvq_runtime.hf.model import settings_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SHARED = {"shared_expert_intermediate_size": 32}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
         "num_hidden_layers": 4, "sliding_window": 16, "use_sliding_window": True}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * 3}
RECURRENT = {"layer_types": ["linear_attention", "full_attention", "full_attention"], "linear_num_value_heads": 2,
             "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
MAMBA = {"layers_block_type": ["mamba", "hybrid", "hybrid"], "mamba_d_state": 16, "head_dim": ...,
         "num_key_value_heads": 4}  # fmt: skip
CONVOLVED = {"layer_types": ["conv", "full_attention", "full_attention"]}
SECTIONS = {"head_dim": 16, "rope_parameters": {  # of places of images, which text gives three times the same
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0,
}}  # fmt: skip
THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}}
SEEING = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
          "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14}  # fmt: skip
HEARING = {"num_hidden_layers": 1, "d_model": 32, "output_dim": 64, "encoder_layers": 1, "encoder_attention_heads": 2,
           "encoder_ffn_dim": 32}  # fmt: skip


def tower(text: dict[str, Any], **seeing: Any) -> dict[str, Any]:
    """Settings of a model of images and text."""
    return {"text_config": SHAPE | text, "vision_config": SEEING | seeing}


WIDER = {"head_dim": 64, "num_key_value_heads": 1}  # where all tokens are attended to
GEMMA4 = EXPERTS | {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 16,
    "per_layer_config": {"1": WIDER, "3": WIDER}, "attention_k_eq_v": True, "enable_moe_block": True,
    "top_k_experts": 2,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0,
}  # fmt: skip
NORTH = MIXED | {"head_dim": 16, "rope_parameters": {  # of Cohere's models of images
    "full_attention": None,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}}  # fmt: skip
LATENT = {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 24,
          "head_dim": 16, "num_key_value_heads": 4}  # fmt: skip
CHOSEN = EXPERTS | ROUTED | LATENT | {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 8}  # by an indexer
SHARED_CHOICE = CHOSEN | {"indexer_types": ["full", "shared", "full"]}
NOTE = CHOSEN | {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "head_dim": 32,
    "sliding_window": 16, "shared_experts_intermediate_size": 32, "swa_num_attention_heads": 4, "swa_head_dim": 32,
    "swa_num_key_value_heads": 4, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 32, "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16}  # fmt: skip
M3 = EXPERTS | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2,
      "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 3}  # fmt: skip
QSA = EXPERTS | SHARED | RECURRENT | {
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "hc_count": 2, "hc_lowrank": 16,
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
V4 = EXPERTS | {
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
    "num_hidden_layers": 6, "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    "num_key_value_heads": 1, "head_dim": 64, "partial_rotary_factor": 0.25, "sliding_window": 16, "q_lora_rank": 24,
    "n_routed_experts": 4, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 6,
    "hc_mult": 2, "mlp_layer_types": ["hash_moe"] + ["moe"] * 5,
}  # fmt: skip
INKLING = EXPERTS | {
    "n_routed_experts": 4, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4, "swa_head_dim": 16, "sliding_window_size": 16, "unpadded_vocab_size": 97,
}  # fmt: skip
BLOCKS = INKLING | {"n_layers_per_attn_res_block": 2}
LOOP = INKLING | {
    "num_hidden_layers": 4, "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid"],
    "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3,
}  # fmt: skip
SHARING = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "sliding_window": 16,
           "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}  # fmt: skip
E2B = SHARING | {  # of Gemma 4
    "per_layer_config": {str(n): {"head_dim": 64, "num_key_value_heads": 1} for n in (1, 3, 5)},
    "enable_moe_block": False,
}  # fmt: skip
LLAMA4 = {"intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 16, "floor_scale": 16,
          "no_rope_layers": [1, 0, 1, 0], "num_hidden_layers": 4}  # fmt: skip
LATER = (  # than the oldest transformers
    "internlm3", "iquestcoder", "kolibri1", "flint", "lfm3", "lfm3_vl", "bailing_hybrid", "sarvam_moe", "sarvam_mla",
    "lara_mini", "apertus1p5_text", "beam", "exaone", "granite_docling", "hyperclovax_vision_v2", "minicpmv4_7",
    "minicpm_ocr", "muse_spark", "pp_chart2table", "zaya", "molmo2", "apertus1p5", "dots3_note", "dots3_note_text",
    "mistral_large4", "hy_v4_vl", "nemotron_h_omni", "dory",
    "inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text",
)  # fmt: skip
NEMOTRON = EXPERTS | ROUTED | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "full_attention"], "mamba_num_heads": 4,
    "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
OLD = {"head_dim": ..., "num_key_value_heads": ...}  # settings that a type does not have
OWN = {
    "glm4_moe": EXPERTS | ROUTED, "sarvam_moe": EXPERTS | ROUTED,
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2}, "hunyuan_v1_moe": EXPERTS | {"moe_topk": 2},
    "dots1": EXPERTS | FULL | ROUTED | {"n_shared_experts": 1},
    "minimax_m2": EXPERTS, "afmoe": EXPERTS | {"num_dense_layers": 1},
    "phimoe": EXPERTS, "olmoe": EXPERTS | {"head_dim": 16},
    "ministral3": {"sliding_window": None},
    "mistral": {"sliding_window": None}, "mixtral": EXPERTS, "qwen2_moe": EXPERTS | SHARED, "qwen3_moe": EXPERTS,
    "granitemoe": EXPERTS, "gpt_oss": EXPERTS | FULL, "gemma2": MIXED, "gemma3_text": MIXED, "cohere2": FULL,
    "olmo3": MIXED, "exaone4": FULL | {"sliding_window": None}, "smollm3": {"no_rope_layers": [1, 1, 0]},
    "stablelm": {"head_dim": 16, "partial_rotary_factor": 0.5}, "opt": OLD | {"intermediate_size": ..., "ffn_dim": 96},
    "flex_olmo": EXPERTS, "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "granitemoeshared": EXPERTS | {"shared_intermediate_size": 32}, "solar_open": EXPERTS | ROUTED,
    "hy_v3": EXPERTS | ROUTED, "laguna": EXPERTS | FULL | SHARED | {"num_attention_heads_per_layer": [4, 4, 4]},
    "mellum": EXPERTS | FULL, "cohere2_moe": EXPERTS | FULL,
    "exaone_moe": EXPERTS | ROUTED | FULL | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "kolibri1": EXPERTS | FULL, "flint": EXPERTS | FULL, "granite_swa": MIXED, "granitemoe_swa": EXPERTS | MIXED,
    "vaultgemma": MIXED, "gemma4_text": GEMMA4, "gemma4_unified_text": GEMMA4,
    "gemma4": tower(GEMMA4, head_dim=16, global_head_dim=16),
    "gemma4_unified": {"text_config": SHAPE | GEMMA4},
    "lfm2": CONVOLVED, "lfm2_moe": EXPERTS | CONVOLVED | {"num_dense_layers": 1}, "lfm3": CONVOLVED,
    "qwen3_next": EXPERTS | SHARED | RECURRENT, "qwen3_5_text": RECURRENT, "olmo_hybrid": RECURRENT,
    "qwen3_5_moe_text": EXPERTS | SHARED | RECURRENT,
    "lara_mini": EXPERTS | SHARED | RECURRENT | {"sliding_window": 16,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention", "full_attention"],
        "num_hidden_layers": 4},
    "minimax": EXPERTS | {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "sarvam_mla"), EXPERTS | ROUTED | LATENT),
    "mistral4": EXPERTS | ROUTED | LATENT | {"head_dim": 32},
    **dict.fromkeys(("kimi_linear",), EXPERTS | ROUTED | LATENT | {
        "layer_types": ["linear_attention", "full_attention", "full_attention"], "linear_head_dim": 16,
        "linear_num_heads": 4, "n_routed_experts": 4}),
    "bailing_hybrid": EXPERTS | ROUTED | LATENT | {
        "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "minicpm3": LATENT | {"scale_emb": 1.0, "dim_model_base": 64},
    "mimo_v2_flash": EXPERTS | MIXED | {"n_routed_experts": 4, "head_dim": 36, "v_head_dim": 28,
                                        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "longcat_flash": LATENT | {"num_layers": 2, "num_hidden_layers": ..., "n_routed_experts": 4, "zero_expert_num": 2,
                               "moe_topk": 2, "expert_ffn_hidden_size": 32, "routed_scaling_factor": 1.0},
    "youtu": LATENT | {"pad_token_id": None},  # whose row transformers sets to 0 when it loads
    "gemma3n_text": SHARING | {"head_dim": 16, "altup_num_inputs": 2, "laurel_rank": 8, "intermediate_size": [128] * 6,
                               "activation_sparsity_pattern": [0.0] * 6},
    "deepseek_v32": CHOSEN, "axk2": CHOSEN | {"gated_norm_rank": 8, "first_k_dense_replace": ...},
    "glm_moe_dsa": SHARED_CHOICE, "hy_v4": SHARED_CHOICE, "dots3_note_text": NOTE, "qwen4_exp_text": QSA,
    "dots3_note": tower(NOTE, adapter_in_dim=32, adapter_out_dim=64, mlp_layer_types=["dense"])
    | {"audio_config": {"adapter_input_size": 32, "adapter_out_dim": 64, "whisper_config": HEARING}},
    "glm5_next": tower(CHOSEN | {"index_kpool": 4, "hc_mult": 2, "linear_head_dim": 16, "linear_num_heads": 4,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "qk_rope_head_dim": 0,
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"]}, projection_intermediate_size=32),
    "qwen4_exp": tower(QSA), "minimax_m3_vl_text": M3, "minimax_m3_vl": tower(M3),
    "hy_v4_vl": tower(SHARED_CHOICE | {"rope_parameters": THREE["rope_parameters"] | {"mrope_section": [3, 3, 2]}}),
    "mistral_large4": tower(SHARED_CHOICE, model_type="pixtral"),
    "deepseek_v4": V4,
    "bitnet": {"head_dim": 16}, "helium": {"head_dim": 16},
    "persimmon": {"head_dim": 16, "num_key_value_heads": 4}, "fuyu": {"head_dim": 16, "num_key_value_heads": 4},
    "granitemoehybrid": EXPERTS | RECURRENT | {
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
        "shared_intermediate_size": 32,
    },
    "qwen3_5": tower(RECURRENT), "qwen3_5_moe": tower(EXPERTS | SHARED | RECURRENT),
    "qwen3_vl": tower({}), "qwen3_vl_moe": tower(EXPERTS), "qwen2_5_vl": tower(SECTIONS),
    "qwen2_vl": tower(SECTIONS, embed_dim=32), "glm4v": tower(SECTIONS),
    "glm4v_moe": tower(EXPERTS | ROUTED | SECTIONS), "gemma3": tower(MIXED) | {"mm_tokens_per_image": 1},
    "llava": tower({"model_type": "llama"}, model_type="clip_vision_model"),
    "mistral3": tower({"model_type": "mistral", "sliding_window": None}, model_type="pixtral"),
    "internvl": tower({"model_type": "qwen2"}), "got_ocr2": tower({"model_type": "qwen2"}),
    "smolvlm": tower({"model_type": "llama"}), "idefics3": tower({"model_type": "llama"}),
    "lfm2_vl": tower({"model_type": "lfm2"} | CONVOLVED, model_type="siglip2_vision_model"),
    "lfm3_vl": tower({"model_type": "lfm3"} | CONVOLVED, num_key_value_heads=2), "glm_ocr": tower(SECTIONS),
    "exaone4_5": tower({"model_type": "exaone4"} | MIXED, num_key_value_heads=2),
    "cohere_compass": tower(NORTH, deepstack_visual_indexes=[0], num_position_embeddings=16),
    "cohere_compass_text": NORTH,
    "phi4_multimodal": {"head_dim": 16, "vision_config": SEEING | {"num_hidden_layers": 2, "crop_size": 28},
                        "audio_config": SEEING | {"num_blocks": 2, "nemo_conv_channels": 32}},
    "paligemma": tower({"model_type": "gemma"}, model_type="siglip_vision_model") | {"projection_dim": 64},
    "llama4_text": LLAMA4,
    "llama4": tower(LLAMA4, **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)),
    **{kind: tower({"model_type": text}) for kind, text in (
        ("deepseek_vl", "llama"), ("granite_docling", "granite_docling_text"), ("hyperclovax_vision_v2", "hyperclovax"),
        ("lighton_ocr", "qwen3"), ("video_llama_3", "qwen2"),
    )},
    **{kind: tower({"model_type": "llama"}, model_type="clip_vision_model") for kind in (
        "llava_next", "llava_next_video", "video_llava", "vipllava",
    )},
    **{kind: tower({"model_type": "qwen3_5_text"} | RECURRENT) for kind in (
        "minicpmv4_6", "minicpmv4_7", "minicpm_ocr",
    )},
    **{kind: tower(SECTIONS | {"model_type": "glm4v_text"}) for kind in ("glm46v", "glmga")},
    "cohere2_vision": tower({"model_type": "cohere2"} | FULL, model_type="siglip_vision_model"),
    "deepseek_vl_hybrid": tower({"model_type": "llama"}) | {"high_res_vision_config": SEEING | {"output_channels": 32}},
    "idefics2": tower({"model_type": "mistral", "sliding_window": None}),
    "janus": tower({"model_type": "llama"}) | {"vq_config": {"base_channels": 32, "num_embeddings": 64}},
    "llava_onevision": tower({"model_type": "qwen2"}, model_type="siglip_vision_model"),
    "muse_glimmer": tower(EXPERTS), "paddleocr_vl": tower(SECTIONS),
    "ovis2": tower({"model_type": "qwen2"}, vocab_size=64), "step3p7": tower({"sliding_window": 16}),
    "bamba": {"attn_layer_indices": [1, 2], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16,
              "mamba_n_groups": 1},
    "zamba2": MAMBA | {"n_mamba_heads": 4, "use_mem_rope": True, "use_shared_attention_adapter": True,
                       "adapter_rank": 8},
    "jamba": EXPERTS | {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 16, "head_dim": ...},
    "nemotron_h": NEMOTRON,
    "nemotron_h_omni": tower(NEMOTRON, video_temporal_patch_size=2) | {
        "vision_hidden_size": 32, "projector_hidden_size": 32},
    "zamba": MAMBA | {"n_mamba_heads": 2, "attention_head_dim": 32},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_ssm": 128},
    "zaya": EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 24, "intermediate_size": ...},
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese", "falcon", "gpt2", "gpt-sw3", "gpt_bigcode", "bloom"), OLD),
    "ctrl": OLD | {"intermediate_size": ..., "dff": 32},
    "trocr": OLD | {"d_model": 64, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
    "gpt_neo": OLD | {"attention_types": [[["global"], 3]]},
    "mpt": OLD | {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512, "use_cache": True},
    "dbrx": OLD | {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512, "intermediate_size": ...,
                   "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2.0},
                   "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2}},
    **dict.fromkeys(("gptj", "codegen"), OLD | {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "rotary_dim": 8, "intermediate_size": ...}),
    "aya_vision": tower({"model_type": "cohere2"} | FULL, model_type="siglip_vision_model"),
    "aria": tower({"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1})
    | {"projector_patch_to_query_dict": {4: 4}},
    "ernie4_5_vl_moe": tower(EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [32, 32],
        "rope_parameters": THREE["rope_parameters"] | {"mrope_section": [6, 6, 4]}}),
    "muse_spark": tower(EXPERTS | {"moe_hidden_size": 32}, max_position_embeddings=16, pos_emb_height=4,
                        pos_emb_width=4)
    | {"audio_config": HEARING | {"patch_sizes": [16], "hidden_sizes": [32], "depths": [1], "out_hidden_size": 64}},
    "pp_chart2table": tower({"model_type": "qwen2"}),
    "qwen2_5_omni_thinker": tower(SECTIONS) | {"audio_config": HEARING, "vision_start_token_id": 5},
    "qwen3_omni_moe_thinker": tower(EXPERTS | SECTIONS) | {"audio_config": HEARING, "vision_start_token_id": 5},
    "molmo2": tower({}, image_size=[28, 28], head_dim=16, num_key_value_heads=2) | {"adapter_config": {
        "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "text_hidden_size": 64, "vision_feature_layer": [0]}},
    "kimi_k25": tower({"model_type": "deepseek_v3"} | EXPERTS | ROUTED | LATENT),
    "fast_vlm": tower({"model_type": "qwen2"}, model_type="clip_vision_model"),
    "perception_lm": tower({"model_type": "llama"}, model_type="clip_vision_model", model_args={"embed_dim": 32}),
    "deepseek_ocr2": {
        "text_config": SHAPE | EXPERTS | ROUTED | {"head_dim": 16, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "vision_config": {"encoder_config": SEEING, "sam_config": SEEING | {
            "image_size": 64, "output_channels": 16, "downsample_channels": [32, 32]}}},
    **{kind: {"vision_config": SEEING, "text_config": {
        "vocab_size": 97, "embed_dim": 64, "layers": 3, "ffn_dim": 96, "attention_heads": 4,
    }} for kind in ("kosmos-2", "kosmos-2.5")},
    "cosmos3_edge": tower(THREE), "cosmos3_omni": tower({"model_type": "qwen3_vl_text"}),
    "qianfan_ocr": tower({"model_type": "qwen3"}),
    "hunyuan_vl": tower({"rope_parameters": THREE["rope_parameters"] | {"mrope_section": [4, 4, 4, 4]}},
                        text_hidden_size=64, max_image_size=64, max_vit_seq_len=64),
    "chameleon": SHAPE | {"head_dim": 16, "vq_config": {"base_channels": 32, "num_embeddings": 64},
                          "vocabulary_map": {"<image>": 5}},
    "moss_transcribe_diarize": {"text_config": SHAPE | {"model_type": "qwen3"}, "audio_config": HEARING},
    "granite4_vision": tower({}, model_type="clip_vision_model", hidden_size=64)
    | {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1]},
    "emu3": {"text_config": SHAPE | {"head_dim": 16}, "vocabulary_map": {"<image>": 5}, "vq_config": {
        "base_channels": 32, "codebook_size": 64, "embed_dim": 16, "z_channels": 16, "latent_channels": 16}},
    "inkling_text": INKLING, "inkling2_text": BLOCKS,
    "inkling_mm_model": tower(INKLING, text_hidden_size=64, n_layers=1)
    | {"audio_config": {"text_hidden_size": 64, "n_mel_bins": 8, "mel_vocab_size": 16}},
    "inkling2": tower(BLOCKS, text_hidden_size=64, projection_hidden_dim=32),
    "apertus1p5": {"text_config": SHAPE, "image_token_offset": 40, "audio_token_offset": 72, "vision_config": {
        "codebook_size": 32, "embed_dim": 16, "latent_channels": 16, "base_channels": 32, "num_res_blocks": 1},
        "audio_config": {"codebook_size": 16}},
    "dory": MIXED | {"n_input_layers": 1, "n_output_layers": 1,
                     "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]},
    "inkling2_loop_text": LOOP, "inkling2_loop": tower(LOOP, text_hidden_size=64, projection_hidden_dim=32),
    "modernbert-decoder": OLD | {"layer_types": ["sliding_attention", "full_attention", "full_attention"],
                                 "sliding_window": 16},
    "biogpt": OLD,
    "xglm": OLD | {"d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96},
}  # fmt: skip


FALCONS = {  # 7B's; 40B's, which repeats keys before a cache; of as many keys as queries
    "falcon": {}, "falcon+": {"new_decoder_architecture": True, "num_kv_heads": 2}, "falcon=": {"multi_query": False},
    "falcon-": {"alibi": True},
}  # fmt: skip
QUICK = (  # one for each thing that tells architectures apart
    "llama", "qwen2", "qwen3_moe", "phi3", "smollm3", "cohere2+", "gemma3_text", "olmo3", "gemma4", "gpt_oss", "gemma2",
    "qwen3_next", "lfm2_moe", "qwen3_5", "qwen2_5_vl", "glm4v", "kimi_k25", "aria_text", "persimmon", "opt", "nanochat",
    "deepseek_v3", "deepseek_v2", "gemma3n_text", "lfm3_vl", "gpt_neox", "falcon", "dbrx", "bamba", "jetmoe",
    "falcon_h1", "molmo2", "hunyuan_vl", "sarvam_moe", "mimo_v2_flash", "longcat_flash",
    "modernbert-decoder", "glm_moe_dsa", "qwen4_exp_text", "hy_v4", "nemotron_h", "jamba", "deepseek_v4",
    "zaya",
)  # fmt: skip


def table() -> list[list[str]]:
    """A row for each model_type: its name, with a + where some layers slide, and the cells of the three columns."""
    lines = PAGE.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| `model_type` ")) + 2
    body = takewhile(lambda line: line.startswith("|"), lines[first:])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body]
    assert all(len(row) == 4 for row in rows)
    kinds = [
        [kind + "+" * ("some slide" in named), *cells]
        for named, *cells in rows
        for kind in re.findall(r"`([\w.-]+)`", named)
    ]
    assert len(kinds) >= 35
    return kinds


def stored(model: PreTrainedModel, cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers' cache holds of a layer, as kvq stores it: keys and values, [B, H, T, D] each."""
    config, held = model.config.get_text_config(decoder=True), cache.layers[layer]
    what = joined(settings_of(config))
    if what != ENTRIES:
        return halves(what, held.keys, held.values) if what else (held.keys, held.values)
    seen: dict[str, torch.Tensor] = {}
    entries = held.compressed_kv["compressor"][:, None]
    assert torch.equal(pooled(Rows(what, seen), entries, config.qk_rope_head_dim), entries)
    return seen["k"], seen["v"]


def random(kind: str, **settings: Any) -> PreTrainedModel:
    """A model of a type with weights large enough that its choices are not ties; `settings` beside those of OWN."""
    torch.manual_seed(0)
    plain = kind.rstrip("+=-")
    if kind in FALCONS:
        settings = FALCONS[kind] | settings
    if plain in LATER and plain not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {plain}")
    own = OWN.get(plain, {})
    dsa = "index_topk" in str(own) and transformers.__version__.startswith("5.17.")
    if dsa or ("indexer_budget" in str(own) and not hasattr(DynamicIndexedLayer(), "indexer_position_ids")):
        pytest.skip(f"transformers {transformers.__version__} has other caches for what an indexer chooses")
    given = (
        own
        if "text_config" in own
        else SHAPE | own | (MIXED if plain != kind and kind not in FALCONS else {}) | settings
    )
    config = AutoConfig.for_model(plain, **copy.deepcopy({name: one for name, one in given.items() if one is not ...}))
    of_text = plain in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and plain != "emu3"
    made = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
    model = made.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token
                buffer.random_(EXPERTS["num_experts"])
    return model
