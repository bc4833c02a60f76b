"""Why a name of vLLM's has no effect here, or is refused. Each key is a reason, and its value the
names that it holds for. A name that works is in no table: `status.py` asks our own signatures.

A table is for a group of names. "engine" is for arguments of LLM and flags of a server, "request"
for wishes and for fields of the routes' bodies; a group's own table comes before these.
"""

NO_REASONING = "the model does not reason apart from its answer"
NO_STATES = "mamba_ssm_cache_dtype and mamba_block_size say how and where states are kept"
NO_TRANSFER = "kv_transfer_config hands over K and V, for completions and chats"
ONE_KERNEL = "each operation has one implementation"
ONE_NODE = "an engine runs on one machine"
STORES_NOTHING = "the server stores nothing"

WITHOUT_EFFECT = {
    "LLM.enqueue": {"nothing runs yet, so there is no bar": "use_tqdm"},
    "LLM": {"an answer of LLM does not name its model": "served_model_name"},
    "engine": {
        ONE_KERNEL: "attention_backend moe_backend linear_backend kernel_config "
        "sparse_indexer_topk_backend dcp_comm_backend mamba_backend "
        "mamba_ssu_algorithm gdn_prefill_backend kda_prefill_backend kda_decode_backend "
        "ir_op_priority enable_flashinfer_autotune mm_encoder_attn_backend",
        "decode steps are captured as they are, up to max_model_len": ""
        "cudagraph_capture_sizes max_cudagraph_capture_size optimization_level "
        "max_seq_len_to_capture performance_mode specialize_active_lora",
        "there is one all-reduce": "disable_custom_all_reduce disable_nccl_for_dp_synchronization",
        "cascade attention does not exist here": "disable_cascade_attn",
        "safetensors are found by themselves": "load_format safetensors_load_strategy "
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size ignore_patterns "
        "model_loader_extra_config pt_load_map_location max_parallel_loading_workers "
        "use_tqdm_on_load",
        "the hub's own cache is used": "download_dir",
        "a rank reads its own experts alone": "enable_ep_weight_filter",
        "no code of a checkpoint is ever run": "trust_remote_code",
        "there is one kind of config.json": "config_format",
        "there is one implementation of a model": "model_impl",
        "there is one kind of tokenizer": "tokenizer_mode",
        "there is one block manager": "use_v2_block_manager",
        "there is one backend": "structured_outputs_config guided_decoding_backend",
        "there is one hash of a block": "prefix_caching_hash_algo",
        "a request is let in when all of its prompt has room": "scheduler_reserve_full_isl",
        "an engine generates, and the server embeds when it is asked to": "runner convert task",
        "a request's own fields and vLLM's defaults decide": "generation_config",
        "it is for logs and counts, and there is none of its kind": "disable_log_stats "
        "aggregate_engine_logging enable_logging_iteration_details kv_cache_metrics "
        "kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics "
        "show_hidden_metrics_for_version enable_mm_processor_stats jit_monitor_mode "
        "jit_monitor_verbose per_request_spec_decode_metrics log_level log_config_file "
        "logging_config enable_layerwise_nvtx_tracing ray_workers_use_nsight",
        "requests are not logged": "disable_log_requests enable_log_requests max_log_len "
        "enable_log_outputs enable_log_deltas",
        "distributed_executor_backend names who starts the workers": "worker_use_ray",
        "pictures are prepared in one process, once": "mm_processor_cache_type mm_hasher_algorithm "
        "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode renderer_num_workers skip_mm_profiling "
        "mm_tensor_ipc mm_ipc_gpu_memory_gb enable_shm_tensor_arena",
        "calls are always read, if a request has tools": "enable_auto_tool_choice",
        "usage always tells cached tokens": "enable_prompt_tokens_details",
        "a template gets text": "chat_template_content_format",
        "uvicorn_log_level is there": "uvicorn_log_config",
        "headers have a limit in bytes": "h11_max_header_count h11_max_incomplete_event_size",
        "a draw inverts the distribution with a number in float64": "use_fp64_gumbel",
        "an answer's id is in its body": "enable_request_id_headers",
        "one process serves": "api_server_count",
        "model says where the weights are": "model_weights",
        "every step's tokens are streamed": "stream_interval",
        "environment variables of vLLM are not read": "fail_on_environ_validation",
        "/docs loads nothing from the network": "enable_offline_docs",
    },
    "request": {
        "tokens are joined as they are": "spaces_between_special_tokens",
        "it is for extensions of an engine, and there are none": "vllm_xargs",
        "parameters are never copied, because they never change": "skip_clone",
        "text is held back only while a stop string may begin": "output_text_buffer_length",
        "every step's tokens are streamed": "stream_interval",
        "all prompts are searched together, as far as the cache has room": "concurrency_limit",
    },
}
REFUSED = {
    "EngineArgs": {"LLM and the server read it themselves": "max_logprobs chat_template"},
    "LLM": {
        "LLM takes pictures that are loaded; the server fetches them": "allowed_media_domains",
        "an offline engine ends at once; the server has the flag": "shutdown_timeout",
    },
    "engine": {
        ONE_NODE: "master_addr master_port nnodes node_rank distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds data_parallel_rank data_parallel_start_rank "
        "data_parallel_size_local data_parallel_address data_parallel_rpc_port "
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "headless data_parallel_supervisor_port dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold",
        "distributed_executor_backend names who starts replicas, too": "data_parallel_backend",
        "processes are not bound to parts of the machine": "numa_bind numa_bind_nodes "
        "numa_bind_cpus",
        "CUDA_VISIBLE_DEVICES chooses the GPUs": "device_ids",
        "a long prompt is on one device, in chunks": "prefill_context_parallel_size",
        "cp_kv_cache_interleave_size says it": "dcp_kv_cache_interleave_size",
        "queries are gathered in each step": "dcp_q_replicate",
        "batches are not cut in two to overlap": "enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold",
        "experts are placed in order, or by eplb_config": "expert_placement_strategy",
        "an engine keeps its number of processes": "enable_elastic_ep elastic_ep_max_dp_size",
        "tensor parallelism here is that of lesson 20": "enable_hc_sp "
        "enable_batch_sharded_sampling fully_sharded_loras",
        "replicas step on their own, or all in each step": "dp_sync_interval "
        "prefill_schedule_interval enable_nccl_comm_suspend",
        "all weights are on the device": "cpu_offload_gb cpu_offload_params offload_backend "
        "offload_group_size offload_num_in_group offload_prefetch_step offload_params",
        "blocks are offloaded in one way": "kv_offloading_backend",
        NO_TRANSFER: "ec_transfer_config ec_manager_config kv_sharing_fast_prefill",
        NO_STATES: "mamba_config mamba_cache_dtype "
        "mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds",
        "a prefix matches in whole blocks of block_size, and the oldest is evicted": ""
        "prefix_match_unit prefix_cache_retention_interval",
        "a window is part of the model": "disable_sliding_window swa_bounded_replay",
        "all layers have the same kv_cache_dtype": "kv_cache_dtype_skip_layers",
        "max_num_batched_tokens bounds a step": "max_num_scheduled_tokens "
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive",
        "max_num_seqs is both, the room and the limit": "max_num_active_seqs",
        "max_waiting_requests and max_waiting_tokens bound the queue": "max_num_queued_reqs "
        "max_num_queued_tokens",
        "the scheduler keeps no blocks free, and preempts": "watermark",
        "log-probabilities are those of the raw logits": "logprobs_mode",
        "tokens are chosen by the sampler alone": "enable_trace_replay return_sampling_mask "
        "watermark_config",
        "experts of a token are not reported": "enable_return_routed_experts",
        "the newest revision is loaded; a folder holds any other": "revision code_revision "
        "tokenizer_revision",
        "the hub's library reads HF_TOKEN": "hf_token",
        "SamplingParams says it, for each request": "override_generation_config",
        "config.json decides": "hf_overrides hf_config_path model_class_overrides "
        "engram_config diffusion_config",
        "quantization is a name, and the checkpoint's own config says more": "quantization_config "
        "allow_deprecated_quantization",
        "a prompt is text, token ids or pictures": "enable_prompt_embeds enable_mm_embeds "
        "skip_tokenizer_init io_processor_plugin tokens_only",
        "no file of the server is read for a request": "allowed_local_media_path",
        "pictures are prepared as the checkpoint says, and stand where the text has them": ""
        "language_model_only interleave_mm_strings media_io_kwargs mm_processor_kwargs "
        "mm_encoder_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_processor_device "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_device_do_normalize "
        "disable_chunked_mm_input",
        "there is no video": "video_pruning_rate video_pruning_method",
        "an adapter has the model's dtype, and its own file names its layers": "lora_dtype "
        "lora_target_modules enable_tower_connector_lora enable_mixed_moe_lora_format "
        "enable_moe_shared_loras max_lora_cls_labels default_mm_loras",
        NO_REASONING: "reasoning_parser reasoning_parser_plugin reasoning_config "
        "cohere_is_reasoning_model anthropic_disabled_thinking_effort",
        "no code from outside is run": "logits_processors scheduler_cls worker_cls "
        "worker_extension_cls additional_config middleware tool_parser_plugin tool_server",
        "`python -m reference.trace` shows what each step did": "otlp_traces_endpoint "
        "collect_detailed_traces profiler_config custom_histogram_buckets aux_output_config",
        "an engine that is not needed is closed": "enable_sleep_mode sleep_mode_offload_cudagraph "
        "sleep_preserve_parameter_names enable_cumem_allocator",
        "weights do not change while an engine runs": "weight_transfer_config",
        "a dead engine is started again from outside": "fault_tolerance_config "
        "enable_fault_tolerance",
        "embeddings are the mean of the last hidden states": "pooler_config "
        "enable_flash_late_interaction",
        "there is one protocol, HTTP on a TCP port": "grpc grpc_port uds cohere_format",
        "flags are given one by one": "config",
        "a request says so itself": "default_chat_template_kwargs return_tokens_as_token_ids "
        "enable_force_include_usage trust_request_mm_kwargs tool_strict_level "
        "exclude_tools_when_tool_choice_none",
        "answers are the assistant's": "response_role",
        "/metrics has the numbers": "enable_per_request_metrics enable_server_load_tracking "
        "fingerprint_mode fingerprint_value",
        "the tokenizer's files are public": "enable_tokenizer_info_endpoint",
        "a stream has no comments": "sse_keep_alive_interval",
        "uvicorn's log has no more": "log_error_stack disable_access_log_for_endpoints",
        "TLS has a key and a certificate; a proxy can do more": "ssl_ca_certs enable_ssl_refresh "
        "ssl_cert_reqs ssl_ciphers",
        "one server prefills and decodes": "enable_scale_out",
    },
    "request": {
        "no answer carries a watermark": "watermarking",
        "logprobs reports the likeliest tokens, for all places": "logprob_token_ids "
        "prompt_logprob_token_ids prompt_logprob_start",
        "an output always has all that was generated": "output_kind",
        NO_REASONING: "thinking_token_budget reasoning thinking reasoning_effort include_reasoning",
        "an answer ends at its tokens, stop strings and length": "repetition_detection",
        "experts of a token are not reported": "routed_experts_prompt_start",
        "tokens are chosen by the sampler alone": "trace_decode_token_ids",
        "a prompt of token ids can be cut and padded before": "tokenization_kwargs padding",
        "the beginning of a prompt is cut": "truncation_side",
        "pictures are prepared as the checkpoint says": "mm_processor_kwargs media_io_kwargs "
        "mm_payload return_mm_kwargs",
        "the prefix cache is shared by all, and has no salts": "cache_salt",
        NO_TRANSFER: "kv_transfer_params ec_transfer_params",
        "priority and user order requests": "session_id",
        "/tokenize has it": "return_token_offsets return_prompt_text",
        STORES_NOTHING: "background previous_response_id prompt store "
        "previous_input_messages enable_response_messages",
        "the server calls no tools itself": "max_tool_calls",
    },
    "/v1/responses": {
        "OpenAI's /v1/responses has no such field, and /v1/chat/completions does": "logit_bias "
        "structured_outputs repetition_penalty seed stop stop_token_ids ignore_eos top_k min_p "
        "presence_penalty frequency_penalty skip_special_tokens include_stop_str_in_output "
        "chat_template_kwargs priority",
        "an answer's id is the server's": "request_id",
    },
    "/v1/messages": {
        "Anthropic's API has no such field, and /v1/chat/completions does": "chat_template_kwargs",
    },
    "/v1/embeddings": {
        "a hidden state is sent as float32, and cannot be cut shorter without training": ""
        "dimensions embed_dtype endianness",
        "every vector has length 1": "use_activation",
        "an answer's id is the server's": "request_id",
    },
    "methods of LLM": {
        "an engine generates; /v1/embeddings of the server embeds": "embed encode",
        "no supported model family was trained to classify or to score": "classify score",
        "enqueue takes prompts, and chat answers conversations": "enqueue_chat",
        "no code from outside is run in the workers": "apply_model collective_rpc",
        "weights do not change while an engine runs": "init_weight_transfer_engine "
        "start_weight_update start_draft_weight_update update_weights finish_weight_update "
        "update_weight_version get_weight_version shutdown_weight_transfer_engine",
        "an engine that is not needed is closed by shutdown": "sleep wake_up "
        "release_kv_cache_memory",
        "blocks that no request holds make room by themselves": "reset_prefix_cache reset_mm_cache",
        "AsyncLLMEngine.stats has the numbers": "get_metrics",
        "`python -m reference.trace` shows what each step did": "start_profile stop_profile",
    },
    "routes": {
        "/v1/embeddings embeds": "/pooling /v2/embed",
        "no supported model family was trained to classify or to score": "/classify /score "
        "/v1/score /rerank /v1/rerank /v2/rerank /generative_scoring /v1/systemone",
        "there is no audio": "/v1/audio/transcriptions /v1/audio/translations /v1/realtime",
        "adapters are named when the server starts": "/v1/load_lora_adapter "
        "/v1/unload_lora_adapter /adapters /adapters/{adapter_name}",
        STORES_NOTHING: "/v1/responses/{response_id} /v1/responses/{response_id}/cancel",
        "each conversation is a request": "/v1/chat/completions/batch",
        "/tokenize and /detokenize do it": "/v1/completions/render /v1/completions/derender "
        "/v1/chat/completions/render /v1/chat/completions/derender /v1/messages/render "
        "/v1/responses/render",
        "/v1/completions takes token ids": "/inference/v1/generate",
        "a client that leaves aborts its requests": "/abort_requests /inference/v1/abort_requests",
        "/metrics has the numbers": "/load /server_info /kv_event_sources",
        "the routes have their own names": "/invocations",
        "/openapi.json describes the routes, and its pages load from the network": "/docs /redoc "
        "/docs/oauth2-redirect",
        "no client changes how the server runs": "/sleep /wake_up /is_sleeping /pause /resume "
        "/is_paused /collective_rpc /reset_prefix_cache /reset_mm_cache /reset_encoder_cache "
        "/release_kv_cache_memory /start_profile /stop_profile /get_world_size /scale_elastic_ep "
        "/is_scaling_elastic_ep /fault_tolerance/apply /fault_tolerance/status",
        "weights do not change while an engine runs": "/init_weight_transfer_engine "
        "/start_weight_update /start_draft_weight_update /update_weights /finish_weight_update "
        "/update_weight_version /shutdown_weight_transfer_engine /weight_info /weight_checker",
    },
}
