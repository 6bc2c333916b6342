"""config.json, completed and checked: every key that changes the maths is honoured or refused by name.

A family declares the keys it reads, with what transformers takes for a missing one, and the keys whose values its
layers are bound to (`families.py`). Of the others, some say nothing about the maths; some would change it if the family
knew them, and are refused unless they are neutral; the rest nobody knows, and they are named in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.config.families import Family, family_of, refuse_known
from quire.config.files.mistral_format import PARAMS, config_of
from quire.config.files.wrappers import is_wrapper, lift, lifted_overrides
from quire.config.peft import CONFIG as ADAPTER
from quire.config.quantization import QUANTIZATION_KEYS
from quire.config.reading import read, read_count, read_positive, without_long_integers
from quire.config.rope import ROPE_KEYS, read_rope
from quire.config.transformers_models import fallback_config, implementation
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import read_json_object, shown


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Of training, of files, of how results are presented; of generation, which generation_config.json says better.
HARMLESS = _words(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation_internal _name_or_path _num_labels activation_dropout architectures attention_dropout
    attention_probs_dropout_prob attn_implementation attn_pdrop auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward classifier_dropout classifier_dropout_prob cross_attention_hidden_size
    decoder_start_token_id
    diversity_penalty do_sample dropout dtype early_stopping embd_dropout embd_pdrop embedding_dropout
    encoder_no_repeat_ngram_size eod_token_id eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id function_to_apply gradient_checkpointing hidden_dropout
    hidden_dropout_prob id2label init_std initializer_factor initializer_range is_matryoshka
    keys_to_ignore_at_inference label2id layerdrop length_penalty matryoshka_dimensions max_length min_length
    model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_past output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty resid_pdrop residual_dropout return_dict return_dict_in_generate
    sbert_ce_default_activation_function sentence_transformers sep_token_id summary_activation summary_first_dropout
    summary_last_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_token_id use_bfloat16 use_cache use_return_dict
    chunk_size mamba_chunk_size mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_layers_block_type num_logits_to_keep
    rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_init_scheme time_step_max time_step_min
    time_step_rank time_step_scale use_associative_scan use_falcon_mambapy use_mamba_kernels use_mambapy
    z_loss_coefficient
    aux_loss_alpha embedding_initializer_range ep_size output_router_logits router_aux_loss_coef seq_aux
    classifier_from_token cls_token_id deterministic_flash_attn initializer_cutoff_factor is_original_qwen3_reranker
    mask_token_id mlp_dropout qa_dropout reference_compile seq_classif_dropout
    sparse_pred_ignore_index sparse_prediction unpad_inputs use_memory_efficient_attention
    quantization_config compression_config
    altup_coef_clip cls_dropout legacy pooler_dropout pooler_hidden_size emb_pdrop embedding_fraction init_device
    linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
    """
)
# Of other families: in a config of one that does not know them they would be ignored without a word.
ELSEWHERE = _words(
    """
    add_swa_attention_sink_bias alibi attention_chunk_size attention_multiplier attn_logit_softcapping
    attn_output_gate block_configs clip_qkv dim_model_base dual_chunk_attention_config embedding_multiplier
    final_logit_softcapping interleaved_sliding_window kv_lora_rank layer_types llama_4_scaling logit_scale
    logits_scaling mlp_layer_types multi_query n_routed_experts new_decoder_architecture no_rope_layer_interval
    no_rope_layers num_experts num_kv_shared_layers num_local_experts parallel_attn per_layer_config
    pruned_heads q_lora_rank qk_layernorm query_pre_attn_scalar residual_multiplier rope_interleaved
    rope_local_base_freq
    rope_ratio rotary_dim rotary_pct scale_attn_by_inverse_layer_idx scale_depth scale_emb sliding_window
    sliding_window_pattern swiglu_limit text_config use_bidirectional_attention use_dynamic_ntk use_logn_attn
    use_parallel_residual use_post_norm use_qk_norm word_embed_proj_dim
    """
)
# Of decoders that were made encoders. Those that generate are refused later (`resolve.py`).
_BOTH_WAYS = {"is_causal": False, "use_bidirectional_attention": True}
_NULLABLE = _words("""
    attn_logit_softcapping dim_model_base final_logit_softcapping mamba_d_ssm moe_latent_size num_key_value_heads
    num_nextn_predict_layers q_lora_rank scale_depth sliding_window
    """)
# Numbers, though there are none by default.
_NUMBERS = {"attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "attention_multiplier"}
_SIZES = {"num_key_value_heads", "head_dim", "intermediate_size"}  # some families have but the usual ones
_FROM_ZERO = _words(
    """
    altup_active_idx attn_layer_offset expert_layer_offset first_k_dense_replace max_window_layers
    moe_layer_start_index moe_num_shared_experts n_shared_experts num_dense_layers num_experts num_local_experts
    num_mtp_layers num_kv_shared_layers num_nextn_predict_layers pad_token_id rotary_dim shared_intermediate_size
    sliding_window type_vocab_size
    """
)
# And checked there.
_READ_ELSEWHERE = _words(
    """
    activation_sparsity_pattern attn_config attn_layer_indices attn_temperature_tuning dual_chunk_attention_config
    full_attn_idxs hybrid_override_pattern intermediate_size layer_types layers_block_type linear_attn_config
    mamba_d_head mamba_dt_rank max_relative_positions mlp_layer_types mlp_multipliers mlp_only_layers
    moe_layer_end_index moe_layers moe_topk no_rope_layers norm_rel_ebd pos_att_type position_buckets
    position_embedding_type rope_parameters share_att_key sliding_window_pattern split_projections ssm_multipliers
    time_step_limit time_step_rank
    """
)


@dataclass(frozen=True, kw_only=True)
class HFConfig:
    family: Family
    architecture: str
    values: dict[str, Any]  # as given, what was missing filled in, rotary settings in one form
    unknown: tuple[str, ...]  # keys that mean nothing here, nor to transformers
    given: dict[str, Any] = field(default_factory=dict)  # values as they are, of a model without a family
    wrapper: str = ""  # the architecture that the decoder was lifted out of
    is_mistral: bool = False  # read from params.json, which goes with tensors of other names


def read_hf_config(
    folder: Path, overrides: Mapping[str, Any], impl: str = "auto", form: str = "auto", *, trusted: bool = False
) -> HFConfig:
    """impl, trusted: the options model_impl and trust_remote_code. form: "hf" reads config.json, "mistral" params.json,
    "auto" the first that is there.

    Raises ConfigError naming the key that is missing, not of its type, out of range or not supported.
    """
    file, is_mistral = config_file(folder, form)
    name = f"{folder}/{PARAMS if is_mistral else 'config.json'}"
    given = {**file, **overrides}
    architecture = architecture_of(given, name)
    if not implementation(given, architecture, impl, trusted=trusted):
        return replace(hf_config(file, overrides, name), is_mistral=is_mistral)
    if is_mistral:
        raise ConfigError(f"{name} is of Mistral's own form, which model_impl=transformers does not read", "model_impl")
    given = without_long_integers(given, given.keys() - HARMLESS, file=name)
    family, values = fallback_config(given, architecture, name)
    return HFConfig(family=family, architecture=architecture, values=values, unknown=(), given=given)


_PIPELINE = "model_index.json"  # of diffusers


def config_file(folder: Path, form: str = "auto") -> tuple[dict[str, Any], bool]:
    """What config.json holds, or would hold if params.json were one; and whether it is the latter.

    form: "hf" reads the first, "mistral" the other, "auto" the first of them that is there.
    """
    if form == "mistral" or (form == "auto" and not (folder / "config.json").exists() and (folder / PARAMS).exists()):
        return config_of(read_json_object(folder / PARAMS, "model")), True
    file = folder / "config.json"
    if not file.exists() and (folder / ADAPTER).exists():
        base = read_json_object(folder / ADAPTER, "model").get("base_model_name_or_path")
        raise ConfigError(
            f"{folder} holds an adapter and no model: name its base model{f', {shown(base)},' if base else ''} and "
            "--enable-lora --lora-modules NAME=FOLDER",
            "model",
        )
    if not file.exists() and (folder / _PIPELINE).exists():
        raise ConfigError(
            f"{folder} holds a pipeline that makes images or video: Quire runs models that read and write text", "model"
        )
    return read_json_object(file, "model"), False


def hf_config(file: Mapping[str, Any], overrides: Mapping[str, Any], name: str = "config.json") -> HFConfig:
    """The same of a config.json that has been read; name: of it, for errors."""
    architecture, wrapper = architecture_of({**file, **overrides}, name), ""
    if is_wrapper(architecture):
        file, overrides, wrapper = lift(file, architecture), lifted_overrides(overrides), architecture
        architecture = architecture_of(file, name)
    if file.get("lora_adaptations"):
        refuse_known("XLMRobertaLoRA", architecture)
    family = family_of(architecture)
    file, overrides = (_renamed(config, family.aliases) for config in (file, overrides))
    told = {*family.defaults, *family.fixed, *ROPE_KEYS, *QUANTIZATION_KEYS}
    file, overrides = (without_long_integers(one, told, file=name) for one in (file, overrides))
    given = {**file, **overrides}
    values = {**family.defaults, **given}
    if family.is_own and (missing := [key for key in family.defaults if key not in given and key != "rope_parameters"]):
        raise ConfigError(f"{name} lacks {', '.join(missing)}", "model")
    for key, default in family.defaults.items():
        _check(values, key, default)
    for key, allowed in family.fixed.items():
        if key in given and not _among(given[key], allowed) and _BOTH_WAYS.get(key) is not given[key]:
            said = _listed(allowed)
            why = f"are made for {said}" if said else "do not know it"
            raise _unsupported(key, given[key], f"{family.name}'s layers {why}")
    known = {*HARMLESS, *family.defaults, *family.fixed}
    unknown = []
    if "rope_parameters" in family.defaults:
        known |= set(ROPE_KEYS)
        rope, ignored = read_rope(file, overrides, family.rotary, values["max_position_embeddings"])
        unknown += ignored
        known |= {"rope_local_base_freq"} if "sliding_attention" in family.rotary else set()
        values = {key: value for key, value in values.items() if key not in ROPE_KEYS}
        values["rope_parameters"] = rope
    for key in () if family.is_own else given.keys() - known:
        if key not in ELSEWHERE:
            unknown.append(key)
            if key in _SIZES:  # that a family does not know
                del values[key]
        elif given[key] is True or (given[key] and given[key] != 1):
            raise _unsupported(key, given[key], f"{family.name}'s layers do not know it")
    return HFConfig(
        family=family, architecture=architecture, values=values, unknown=tuple(sorted(unknown)), wrapper=wrapper
    )


def sees_both_ways(config: HFConfig) -> bool:
    """Whether it is a decoder whose tokens attend to those behind them too."""
    told = any(key in config.family.fixed and config.values.get(key) is on for key, on in _BOTH_WAYS.items())
    return told or "Bidirectional" in config.architecture


def architecture_of(given: Mapping[str, Any], name: str) -> str:
    """Of a config.json. Raises ConfigError if it does not say."""
    names = given.get("architectures")
    if names is not None and (not isinstance(names, list) or not all(isinstance(item, str) for item in names)):
        raise ConfigError(f"{name}: architectures must be a list of strings, got {shown(names)}", "model")
    if not names:
        raise ConfigError(f"{name} has no 'architectures': Quire cannot tell what model this is", "model")
    return str(names[0])


def _renamed(config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """By the names that all families use. Raises ConfigError for a key that is given by both of its names, unlike."""
    renamed: dict[str, Any] = {}
    for key, value in config.items():
        name = aliases.get(key, key)
        told = renamed.get(name)
        if told is not None and value is not None and told != value:
            raise ConfigError(f"config.json: {key}={shown(value)} contradicts {name}={shown(told)}", key)
        renamed[name] = told if value is None else value
    return renamed


def _check(values: Mapping[str, Any], key: str, default: Any) -> None:
    """Of the type of what the family takes for a missing one; a size if that is none."""
    if key in _READ_ELSEWHERE:
        return
    if values[key] is None and (default is None or key in _NULLABLE):
        return
    if values[key] is None:
        raise ConfigError(f"config.json: {key} must not be null", key)
    if key in _NUMBERS:
        default = 0.0
    if isinstance(default, bool | str):
        read(type(default), values, key)
    elif isinstance(default, float):
        number = read(float, values, key)
        if number < 0:
            raise ConfigError(f"config.json: {key} must be >= 0, got {number:g}", key)
    elif key in _FROM_ZERO:
        read_count(values, key)
    else:
        read_positive(values, key)


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(item) and value == item for item in allowed)


def _listed(allowed: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in allowed if value is not None)


def _unsupported(key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(
        f"config.json: {key}={shown(value)} is not supported: {why}; "
        f'hf_overrides={{"{key}": null}} runs the model as if it were not there',
        key,
    )
