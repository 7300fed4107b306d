"""vLLM engine options for features, devices and kernels that jaxserve lacks: names and accepted values.

Other vLLM options are in `vllm_options`. Here one clause serves many names, each with the values that leave the feature
off; options in `ANY_VALUE` never change results.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Row = tuple[str, Sequence[Any] | None, str]  # behaviour, values that match it (None: any), names separated by spaces

OFF: tuple[Any, ...] = (False, None)
_SWITCH: tuple[Any, ...] = (False, True, None)
UNSET: tuple[Any, ...] = (None, {}, [], "")
# Options that are switches on vLLM's command line although their names do not begin with enable or disable.
SWITCHES = frozenset(
    (
        *("return_sampling_mask", "numa_bind", "dcp_q_replicate", "data_parallel_hybrid_lb"),
        *("data_parallel_external_lb", "data_parallel_multi_port_external_lb", "long_prefill_token_threshold_adaptive"),
        *("use_fp64_gumbel", "aggregate_engine_logging", "allow_deprecated_quantization", "language_model_only"),
        *("interleave_mm_strings", "mm_encoder_only", "skip_mm_profiling", "mm_device_do_normalize"),
        *("fully_sharded_loras", "specialize_active_lora", "scheduler_reserve_full_isl", "kv_cache_metrics"),
        *("cudagraph_metrics", "jit_monitor_verbose", "monokernel", "sleep_mode_offload_cudagraph", "use_replayssm"),
        *("kv_sharing_fast_prefill", "swa_bounded_replay", "tokens_only", "fail_on_environ_validation"),
        *("trust_request_mm_kwargs", "exclude_tools_when_tool_choice_none", "headless"),
        *("cohere_is_reasoning_model", "log_error_stack", "allow_credentials"),
    )
)

ANY_VALUE: Mapping[str, str] = {
    "safetensors are mapped into memory and read by several threads": (
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size pt_load_map_location "
        "enable_ep_weight_filter enable_shm_tensor_arena"
    ),
    "steps are compiled for a few sizes: see compile_ahead": (
        "cudagraph_capture_sizes max_cudagraph_capture_size optimization_level jit_monitor_verbose "
        "enable_flashinfer_autotune disable_cascade_attn enable_batch_sharded_sampling"
    ),
    "several processes are set up by jaxserve.distributed": (
        "master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds all2all_backend "
        "disable_nccl_for_dp_synchronization dp_sync_interval enable_nccl_comm_suspend elastic_ep_max_dp_size "
        "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold"
    ),
    "cached pages are found by a hash of their tokens, and the least recently used are evicted": (
        "prefix_caching_hash_algo mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint "
        "replayssm_buffer_len use_replayssm swa_bounded_replay"
    ),
    "kv_offloading_path names the directory of pages on disk": "kv_offloading_backend",
    "weights stay on the device": (
        "offload_backend offload_group_size offload_num_in_group offload_prefetch_step "
        "sleep_mode_backend sleep_mode_offload_cudagraph enable_cumem_allocator"
    ),
    "a prompt starts when the pages of its next tokens are free": "scheduler_reserve_full_isl",
    "images are preprocessed on the host, and encoded on the device between steps": (
        "disable_chunked_mm_input mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc "
        "mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize renderer_num_workers "
        "enable_mm_processor_stats"
    ),
    "one program serves any mix of LoRA adapters, whose factors are split as the matrices that they change": (
        "fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras "
        "max_lora_cls_labels"
    ),
    "recurrent states are float32 and computed by XLA": "mamba_backend mamba_ssu_algorithm mamba_cache_philox_rounds",
    "there are no deprecated formats, metrics or variables to allow or to show": (
        "allow_deprecated_quantization show_hidden_metrics_for_version kv_cache_metrics_sample "
        "fail_on_environ_validation aggregate_engine_logging"
    ),
}

UNSUPPORTED: Sequence[Row] = (
    ("config.json comes from the model's directory; hf_overrides replaces fields of it", UNSET, "model_weights"),
    ("an architecture has one implementation", UNSET, "model_class_overrides"),
    ("quantization names a format, and quantised checkpoints bring their own settings", UNSET, "quantization_config"),
    (
        "safetensors are mapped into memory and read by several threads",
        (None, "auto", "lazy", "eager", "prefetch"),
        "safetensors_load_strategy",
    ),
    (
        "routing and masks are not returned; count_expert_tokens counts the tokens of experts",
        OFF,
        "enable_return_routed_experts return_sampling_mask enable_trace_replay",
    ),
    ("it is not supported", UNSET, "aux_output_config watermark_config diffusion_config engram_config"),
    ("log probabilities are those before temperature, penalties and masks", ("raw_logprobs",), "logprobs_mode"),
    ("noise of samples is float32", OFF, "use_fp64_gumbel"),
    (
        "the fastest kernels are chosen; attention_backend and linear_backend name others",
        (None, "auto", {}, False),
        (
            "moe_backend sparse_indexer_topk_backend gdn_prefill_backend kda_prefill_backend kda_decode_backend "
            "attention_config kernel_config mamba_config ir_op_priority monokernel"
        ),
    ),
    ("JAX drives all devices of a process; CUDA_VISIBLE_DEVICES tells it which", UNSET, "device_ids"),
    ("start the command under numactl", (*OFF, []), "numa_bind numa_bind_nodes numa_bind_cpus"),
    ("several processes are set up by jaxserve.distributed", (1, None), "nnodes _api_process_count"),
    ("several processes are set up by jaxserve.distributed", (0, None), "node_rank _api_process_rank"),
    (
        "data_parallel_size replicas run in one process, which chooses among them",
        (None, False, "mp"),
        (
            "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
            "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
            "data_parallel_multi_port_external_lb data_parallel_backend"
        ),
    ),
    (
        "only tensor and expert parallelism split a model",
        (1, False, None),
        "prefill_context_parallel_size enable_hc_sp",
    ),
    (
        "experts are divided equally and stay where they are",
        (False, None, {}, "linear"),
        "enable_elastic_ep enable_eplb eplb_config expert_placement_strategy",
    ),
    ("a step is one batch; step_ahead overlaps it with the host", (False, None, 0), "enable_dbo ubatch_size"),
    ("all weights stay on the device", (*UNSET, set()), "cpu_offload_params offload_params"),
    ("cached pages are evicted when they are needed", (None, 0), "prefix_cache_retention_interval prefix_match_unit"),
    ("all layers have kv_cache_dtype", UNSET, "kv_cache_dtype_skip_layers"),
    ("all layers compute a prompt", OFF, "kv_sharing_fast_prefill"),
    ("layers with a window have pages of their own", OFF, "disable_hybrid_kv_cache_manager"),
    ("states are rounded to the nearest", OFF, "enable_mamba_cache_stochastic_rounding"),
    ("max_num_batched_tokens is the limit", (None,), "max_num_scheduled_tokens"),
    ("long_prefill_token_threshold is fixed", OFF, "long_prefill_token_threshold_adaptive"),
    ("max_num_seqs is the limit", (None,), "max_num_active_seqs"),
    (
        "the server has the limits, as max_queued_requests and max_queued_tokens",
        (None,),
        "max_num_queued_reqs max_num_queued_tokens",
    ),
    ("each step may start prompts", (1,), "prefill_schedule_interval"),
    ("all pages may be used", (0,), "watermark"),
    ("outputs are streamed as they come", (None, 1), "stream_interval"),
    ("the scheduler is jaxserve's own", (None,), "scheduler_cls"),
    ("max_num_seqs and max_num_batched_tokens trade latency for throughput", ("balanced",), "performance_mode"),
    ("compilations while serving are counted; forbid_compiles raises", ("warn",), "jit_monitor_mode"),
    ("speculative_config is the option", (None,), "spec_method spec_model spec_tokens"),
    (
        "prompts are text or token ids",
        (*OFF, {}, []),
        ("enable_mm_embeds interleave_mm_strings media_io_kwargs mm_encoder_only io_processor_plugin"),
    ),
    ("requests name their LoRA adapters", UNSET, "default_mm_loras"),
    ("adapters' files decide which modules they change", UNSET, "lora_target_modules"),
    ("adapters change the language model", OFF, "enable_tower_connector_lora"),
    ("factors of LoRA adapters have the dtype of the weights", (None, "auto"), "lora_dtype"),
    ("the server reads reasoning; offline it is part of the text", UNSET, "reasoning_parser reasoning_config"),
    ("there are no plug-ins", UNSET, "reasoning_parser_plugin worker_extension_cls additional_config"),
    (
        "llm.engine.stats and the server's /metrics have the statistics",
        (*OFF, "none", {}),
        (
            "per_request_spec_decode_metrics kv_cache_metrics custom_histogram_buckets cudagraph_metrics "
            "enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details"
        ),
    ),
    ("jax.profiler makes profiles", UNSET, "profiler_config"),
    (
        "Python's logging has the logger jaxserve, and commands have --log-level",
        UNSET,
        "logging_config log_level log_config_file",
    ),
    ("the KV cache is not transferred", UNSET, "ec_transfer_config ec_manager_config"),
    ("sleep(2) drops all weights", UNSET, "sleep_preserve_parameter_names"),
    (
        "requests in a failed step fail, and others continue",
        (*OFF, {}),
        "fault_tolerance_config enable_fault_tolerance",
    ),
    ("the server's /health fails if steps stop", UNSET, "watchdog_config"),
    ("update_weights takes weights", UNSET, "weight_transfer_config"),
    ("the server serves text as well as tokens", OFF, "tokens_only"),
    ("the server has shutdown_timeout_s", (0, None), "shutdown_timeout"),
)

# The same for vLLM's server.
SERVER: Sequence[Row] = (
    (
        "requests bring chat_template_kwargs",
        (*OFF, {}),
        "trust_request_mm_kwargs default_chat_template_kwargs reasoning_effort_map",
    ),
    ("tools are part of the prompt unless tool_choice is none", _SWITCH, "exclude_tools_when_tool_choice_none"),
    ("there are no plug-ins", UNSET, "tool_parser_plugin tool_server middleware"),
    ("each tool's `strict` decides", (None, "auto"), "tool_strict_level"),
    ("prompts and outputs are not logged", None, "max_log_len enable_log_deltas"),
    ("prompts and outputs are not logged", OFF, "enable_log_outputs"),
    ("usage always has prompt_tokens_details", (True,), "enable_prompt_tokens_details"),
    ("/load always counts the open requests", None, "enable_server_load_tracking"),
    ("streams have no comments", (0, None), "sse_keep_alive_interval"),
    ("there is no such path", OFF, "enable_tokenizer_info_endpoint enable_scale_out enable_offline_docs"),
    ("there is no such interface", None, "cohere_is_reasoning_model cohere_format disable_fastapi_docs"),
    ("thinking is disabled if the chat template can", ("auto",), "anthropic_disabled_thinking_effort"),
    ("failures are logged with their stacks", None, "log_error_stack"),
    ("it cannot be changed", ("full",), "fingerprint_mode"),
    ("it cannot be changed", (None,), "fingerprint_value"),
    ("there is HTTP alone", UNSET, "grpc_port"),
    (
        "data_parallel_size replicas run in one process behind one port",
        None,
        (
            "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
            "dp_supervisor_probe_failure_threshold"
        ),
    ),
    ("requests are logged with --access-log alone", (True,), "disable_uvicorn_access_log"),
    ("--access-log logs all paths", UNSET, "disable_access_log_for_endpoints"),
    ("--allowed-origins is the option for pages of other sites", OFF, "allow_credentials"),
    ("--allowed-origins is the option for pages of other sites", (["*"],), "allowed_methods allowed_headers"),
    (
        "a proxy before the server does TLS",
        (*UNSET, False, 0),
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers",
    ),
    ("a proxy before the server does TLS", OFF, "enable_ssl_refresh"),
    ("replies have ids in their bodies", OFF, "enable_request_id_headers"),
    ("heads of requests are limited to 64 KiB and 256 headers", None, "h11_max_incomplete_event_size"),
    ("heads of requests are limited to 64 KiB and 256 headers", None, "h11_max_header_count"),
    ("pairs are scored by LLM.score", None, "enable_flash_late_interaction"),
    ("one process serves", OFF, "headless"),
    ("one process serves", (1, None), "api_server_count"),
    ("options are flags", UNSET, "config"),
)
