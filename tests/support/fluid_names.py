# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Names of PaddlePaddle Fluid's CPU training; the migration pages place each."""

from __future__ import annotations

NAMES = {
    "DistributeTranspilerConfig": """
        slice_var_up split_method RoundRobin HashName min_block_size enable_dc_asgd mode
        print_log wait_port runtime_split_send_recv sync_mode half_async
        completely_not_async geo_sgd_mode geo_sgd_need_push_nums nccl_comm_num
        use_hierarchical_allreduce hierarchical_allreduce_inter_nranks collective_mode
    """,
    "DistributeTranspiler": """
        transpile get_trainer_program get_pserver_program get_startup_program
        wait_server_ready current_endpoint startup_program
    """,
    "strategies": """
        StrategyFactory DistributedStrategyFactory create_sync_strategy
        create_async_strategy create_half_async_strategy create_geo_strategy
        update_frequency set_program_config set_trainer_runtime_config
        set_server_runtime_config set_execute_strategy set_build_strategy debug_opt
        TrainerRuntimeConfig ServerRuntimeConfig get_communicator_flags a_sync k_steps
        launch_barrier lr_decay_steps use_ps_gpu
    """,
    "Communicator": """
        max_merge_var_num send_queue_size independent_recv_thread
        min_send_grad_num_before_recv thread_pool_size send_wait_times
        is_sgd_optimizer geo_need_push_nums geo_trainer_nums merge_sparse_grad
        merge_sparse_bucket fake_rpc is_running
    """,
    "fleet": """
        init is_first_worker is_worker is_server worker_index worker_num
        worker_endpoints server_index server_num server_endpoints split_files
        init_worker init_server run_server stop_worker distributed_optimizer
        save_inference_model save_persistables all_reduce_worker barrier_worker
        main_program node_num local_rank is_coordinator init_coordinator
        make_fl_strategy get_fl_client load_model load_one_table load_inference_model
        save_one_table save_dense_params save_cache_model save_cache_table
        check_save_pre_patch_done shrink get_file_shard all_gather print_on_rank
        fleet.metrics DistributedInfer
    """,
    "role makers": """
        PaddleCloudRoleMaker UserDefinedRoleMaker UserDefinedCollectiveRoleMaker
        MPISymetricRoleMaker GeneralRoleMaker PADDLE_PSERVERS_IP_PORT_LIST
        PADDLE_TRAINERS_NUM TRAINING_ROLE PADDLE_TRAINER_ID POD_IP PADDLE_PORT
        PADDLE_TRAINING_ROLE PADDLE_TRAINER_ENDPOINTS PADDLE_CURRENT_ENDPOINT
        PADDLE_COORDINATOR_ENDPOINTS STAGE_ID STAGE_NUM PADDLE_STAGE_TRAINERS_NUM
        HETER_DEVICE_TYPE FLAGS_selected_gpus PADDLE_RANK_IN_NODE
        PADDLE_LOCAL_DEVICE_IDS PADDLE_WORLD_DEVICE_IDS PADDLE_WITH_GLOO
        PADDLE_GLOO_ SYS_JOB_ID FLAGS_LAUNCH_BARRIER PADDLE_DISTRI_BACKEND CPU_NUM
    """,
    "launchers": """
        launch_ps fleetrun paddle.distributed.launch --cluster_node_ips --node_ip
        --start_port --print_config --endpoints --worker_num --server_num --log_dir
        --servers --workers --coordinator_num --heter_worker_num --http_port
        --backend --nproc_per_node --ips serverlog workerlog
    """,
    "ParallelExecutor": """
        ParallelExecutor with_data_parallel use_cuda loss_name share_vars_from
        num_trainers trainer_id scope fetch_list feed feed_dict return_numpy
        device_count drop_local_exe_scopes FLAGS_cpu_deterministic
    """,
    "ExecutionStrategy": """
        num_threads allow_op_delay num_iteration_per_drop_scope num_iteration_per_run
        use_thread_barrier use_experimental_executor _dry_run
    """,
    "BuildStrategy": """
        reduce_strategy gradient_scale_strategy debug_graphviz_path
        enable_sequential_execution remove_unnecessary_lock fuse_elewise_add_act_ops
        fuse_bn_act_ops fuse_relu_depthwise_conv fuse_broadcast_ops
        fuse_all_optimizer_ops fuse_all_reduce_ops enable_backward_optimizer_op_deps
        cache_runtime_context sync_batch_norm memory_optimize enable_inplace
        is_distribution async_mode trainers_endpoints
        hierarchical_allreduce_exter_nranks mkldnn_enabled_op_types localsgd
        adaptive_localsgd gradient_merge fuse_grad_size_in_MB last_comm_group_size_MB
        find_unused_parameters release_memory
    """,
    "Dataset": """
        DatasetFactory QueueDataset InMemoryDataset FileInstantDataset BoxPSDataset
        set_pipe_command set_batch_size set_thread set_filelist set_use_var
        set_hdfs_config set_fea_eval slots_shuffle set_queue_num set_parse_ins_id
        set_parse_content set_fleet_send_batch_size set_fleet_send_sleep_seconds
        set_merge_by_lineid load_into_memory preload_into_memory wait_preload_done
        local_shuffle global_shuffle release_memory get_memory_data_size
        get_shuffle_data_size DataGenerator MultiSlotDataGenerator
        MultiSlotStringDataGenerator train_from_dataset infer_from_dataset
        fetch_info print_period fetch_handler FetchHandler update_settings set_date
        tdm_sample download_cmd input_type
    """,
    "optimizers": """
        SGD Momentum LarsMomentum Adam Adagrad Adamax RMSProp DecayedAdagrad Ftrl
        L2Decay L1Decay GradientClipByGlobalNorm GradientClipByValue
        GradientClipByNorm exponential_decay noam_decay @LR_DECAY_COUNTER@ minimize
    """,
    "tables": """
        is_sparse is_distributed sparse_embedding CountFilterEntry ProbabilityEntry
        ShowClickEntry padding_idx checkpoint_notify __lookup_table__
    """,
    "flags": """
        FLAGS_communicator_ FLAGS_rpc_deadline FLAGS_rpc_retry_times
        FLAGS_rpc_send_thread_num FLAGS_rpc_get_thread_num
        FLAGS_rpc_prefetch_thread_num FLAGS_rpc_retry_bind_port
        FLAGS_rpc_disable_reuse_port FLAGS_worker_update_interval_secs
        FLAGS_use_mkldnn FLAGS_eager_delete_tensor_gb FLAGS_rocksdb_path
        FLAGS_pserver_create_value_when_push pserver_timeout_ms
        pserver_connect_timeout_ms pserver_communicate_compress_type
        pserver_max_async_call_num server_thread_num FLAGS_paddle_num_threads
        FLAGS_check_nan_inf
    """,
}
