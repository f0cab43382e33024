"""Settings of Megatron by name: which a key sets, which moerl or the model decides, and which `trainer.megatron` takes.

Plain data; any process. The names are the fields of the providers of Megatron-Bridge 0.6.2 with Megatron-Core 0.19.2.
A test compares them with the installed release: a field that no table has is refused until it stands in one.
"""

from __future__ import annotations

from collections.abc import Mapping


def by_name(names_of: Mapping[str, str]) -> dict[str, str]:
    """Turns around a table of names in texts: returns by name the key of its text."""
    return {name: key for key, names in names_of.items() for name in names.split()}


MEGATRON_KEYS = by_name(
    {
        "parallel.tensor": """
            tensor_model_parallel_size tensor_parallel_num_weight_shards gtp_weight_remat_size sequence_parallel
            scatter_embedding_sequence_parallel""",
        "parallel.pipeline": """
            pipeline_model_parallel_size pipeline_model_parallel_layout num_layers_in_first_pipeline_stage
            num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
            account_for_loss_in_pipeline_split""",
        "parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size",
        "parallel.context": """
            context_parallel_size hierarchical_context_parallel_sizes hybrid_context_parallel
            max_seqlen_per_dp_cp_rank""",
        "parallel.expert": "expert_model_parallel_size",
        "parallel.expert_tensor": """
            expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size""",
        "model.dtype": "params_dtype pipeline_dtype autocast_dtype enable_autocast bf16 fp16 fp8_param fp4_param",
        "trainer.deterministic": "deterministic_mode",
        "trainer.recompute": """
            recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute
            num_microbatches_with_partial_activation_checkpoints""",
        "rl.moe_aux_loss_coef": "moe_aux_loss_coeff moe_router_load_balancing_type",
        "trainer.expert_bias": "moe_router_bias_update_rate",
    }
)
"""Settings of Megatron, and the key that sets each."""

MEGATRON_FIXED = by_name(
    {
        "the model's config.json decides": """
            num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
            seq_length share_embeddings_and_output_weights hf_model_id hf_model_revision

            softmax_scale softmax_type apply_query_key_layer_scaling add_qkv_bias qk_layernorm qk_l2_norm
            attention_output_gate window_size window_attn_skip_freq multi_latent_attention q_lora_rank kv_lora_rank
            qk_head_dim qk_pos_emb_head_dim v_head_dim experimental_attention_variant
            experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
            dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
            dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
            dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_attention_freq linear_conv_kernel_dim
            linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
            use_arbitrary_attention_mask

            position_embedding_type rotary_base rotary_percent rotary_interleaved rope_scaling rope_scaling_factor
            rope_type rotary_scaling_factor seq_len_interpolation_factor no_rope_freq mrope_section
            original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim yarn_rotary_scaling_factor
            yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_mscale yarn_mscale_all_dim
            yarn_correction_range_round_to_int

            normalization layernorm_epsilon layernorm_zero_centered_gamma apply_residual_connection_post_layernorm
            add_bias_linear gated_linear_unit activation_func activation_func_clamp_value glu_linear_offset

            num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size
            moe_shared_expert_gate moe_latent_size moe_apply_probs_on_input moe_router_topk
            moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
            moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias

            mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern
            mtp_standalone mtp_enabled use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult
            mup_base_head_dim mup_attn_scale_power is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups
            mamba_num_heads mamba_training_ssm_states_dtype use_mamba_mem_eff_path heterogeneous_block_specs""",
        "weights come from the model's directory and leave under its names and shapes": """
            perform_initialization init_method output_layer_init_method init_method_std embedding_init_method
            embedding_init_method_std init_model_with_meta_device hetereogenous_dist_checkpoint restore_modelopt_state
            moe_single_grouped_weight moe_single_grouped_bias moe_mlp_glu_interleave_size
            moe_shared_expert_glu_interleave_size mla_down_proj_fusion dense_grouped_gemm
            use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert""",
        "the loss, its denominators and the scores of rollouts rest on it": """
            hidden_dropout attention_dropout attention_softmax_in_fp32 calculate_per_token_loss moe_z_loss_coeff
            moe_router_dtype moe_router_fusion finalize_model_grads_func grad_scale_func moe_grad_scale_func
            mtp_grad_scale_func no_sync_func grad_sync_func param_sync_func fp16_lm_cross_entropy parallel_output
            cross_entropy_loss_fusion cross_entropy_fusion_impl""",
        "every token goes to the experts that its router or its rollout chose": """
            moe_enable_routing_replay moe_router_quantile_balancing_ema moe_router_force_load_balancing
            moe_router_force_biased moe_input_jitter_eps moe_token_dropping moe_token_drop_policy
            moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity""",
        "packed microbatches differ in length": "variable_seq_lengths batch_p2p_comm",
        "the layers follow from the model and from what is installed": """
            transformer_layer_spec transformer_impl use_transformer_engine_full_layer_spec
            gradient_accumulation_fusion""",
        "the trainer samples nothing": """
            flash_decode cache_mla_latents use_inference_optimized_layers nccl_all_reduce_for_prefill
            symmetric_ar_type mlp_chunks_for_prefill moe_pad_experts_for_cuda_graph_inference inference_rng_tracker
            inference_sampling_seed inference_cuda_graph_scope inference_fuse_tp_communication
            inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
            inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type""",
        "no step of moerl makes use of it": """
            qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit pipeline_model_parallel_comm_backend""",
        "it takes an object of Megatron's, no number or text": "timers attention_backend quant_recipe",
        "ids that are never sampled are left out": "should_pad_vocab make_vocab_size_divisible_by",
    }
)
"""Settings of Megatron that no key sets, and why they cannot be passed on."""

_OPEN = """
    use_cpu_initialization use_te_rng_tracker

    tp_comm_overlap tp_comm_overlap_cfg tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
    tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
    tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend cp_comm_type

    overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
    microbatch_group_size_per_vp_stage defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute
    high_priority_a2a_comm_stream overlap_moe_expert_parallel_comm
    overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release

    bias_activation_fusion bias_dropout_fusion masked_softmax_fusion apply_rope_fusion fused_single_qkv_rope
    fused_residual_rmsnorm persist_layer_norm memory_efficient_layer_norm use_fused_weighted_squared_relu
    use_te_activation_func use_transformer_engine_op_fuser flash_attention_version fp32_residual_connection
    disable_bf16_reduced_precision_matmul batch_invariant_mode mlp_chunks_for_training

    moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
    moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion
    moe_permute_fusion_into_hybridep moe_ncclep_static_shape moe_ncclep_zero_copy moe_grouped_gemm
    moe_shared_expert_overlap moe_per_layer_logging moe_router_padding_for_quantization moe_router_padding_for_fp8

    distribute_saved_activations clone_scatter_output_in_embedding disable_parameter_transpose_cache
    activation_func_fp8_input_store cpu_offloading cpu_offloading_num_layers cpu_offloading_activations
    cpu_offloading_weights cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers
    fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads offload_modules
    min_offloaded_tensor_size delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
    activation_offload_fraction moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_buffer_size_factor_cpu

    fp8 fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4 fp4_recipe fp4_quantizer_factory use_kitchen
    use_kitchen_attention kitchen_attention_backend

    enable_cuda_graph cuda_graph_impl cuda_graph_modules cuda_graph_scope cuda_graph_warmup_steps
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph external_cuda_graph config_logger_dir test_mode
"""
MEGATRON_OPEN = frozenset(_OPEN.split())
"""Settings of Megatron that `trainer.megatron` passes on: how the same model is computed. moerl does not check what
they do."""
