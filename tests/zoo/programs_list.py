"""Which faults and clean variants each program has."""

from zoo.fault import Program


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PROGRAMS = (
    Program(
        name="mlp_bn",
        title="multi-layer perceptron with BatchNorm under DDP",
        faults=_words("""
            module_forward unused_parameter unfreeze_after_wrap moved_after_wrap gradient_zeroed stale_optimizer
            late_layer no_zero_grad load_on_rank0 load_nothing no_initial_sync buffers_differ corrupt_all_reduce
            overwritten step_twice decay_differs double_reduction nan_on_one_rank rate_differs no_set_epoch same_data
            sharded_twice shuffle_on_one_rank loader_worker_dies uneven_batches exit_early save_with_barrier
            skips_bad_batch other_order local_decision shape_mismatch stuck_outside rank_stopped
            rank_killed exception interface clock other_model slow_backward slow_forward slow_data slow_link slow_save
            left_in_eval settings_differ loss_weighed loss_muted stream_not_split group_of_one hook_sums
            stays_in_eval cleared_before_step
        """),
        variants=_words("""
            plain frozen frozen_filtered unused_allowed spare_layer static_graph bucket_view small_buckets one_bit sgd
            no_decay fused foreach adagrad stream stream_workers workers no_shuffle smoothing evaluate_on_rank0
            evaluate_all save_on_rank0 ema swa early_stopping join_uneven load_partly
            optimizer_anew
        """),
        modules={
            "unfreeze_after_wrap": "body.0",
            "gradient_zeroed": "head.weight",
            "late_layer": "head",
            "buffers_differ": "body.1",
            "overwritten": "head.weight",
            "nan_on_one_rank": "body.0",
            "settings_differ": "body.1",
        },
    ),
    Program(
        name="tiny_gpt",
        title="small GPT under DDP, with accumulation, clipping, warm-up and cosine, tied weights",
        faults=_words("""
            module_forward unfreeze_after_wrap moved_after_wrap static_graph_changes
            reentrant_checkpoint no_sync_around_backward no_sync_off_by_one layer_ignored stale_optimizer rate_zero
            no_zero_grad load_on_rank0 overwritten decay_differs loss_not_divided loss_divided_twice token_imbalance
            clip_on_one_rank clip_tiny nan_on_one_rank scheduler_per_micro_batch warmup_too_late rate_differs
            scheduler_elsewhere rate_comes_back no_set_epoch same_data tie_broken uneven_batches save_with_barrier
            other_metrics exit_early stuck_outside rank_stopped rank_killed exception clock slow_backward slow_forward
            slow_data autocast_differs clip_each_piece
        """),
        variants=_words("""
            plain no_dropout untied loaded frozen_embedding frozen_reentrant checkpointing stochastic_depth
            early_piece_only static_graph one_bit warmup_from_zero restarts one_cycle token_weighted bf16 sync_each
            no_clip no_accumulation accumulate_4 ema
        """),
        modules={
            "unfreeze_after_wrap": "tokens",
            "layer_ignored": "norm",
            "overwritten": "blocks.0.mlp.0.weight",
            "tie_broken": "head.weight",
            "static_graph_changes": "blocks.0",
            "reentrant_checkpoint": "blocks",
        },
    ),
    Program(
        name="tiny_moe",
        title="mixture of experts in DeepSeek's style under DDP; one variant with an expert per rank",
        faults=_words("""
            module_forward unused_parameter layer_ignored dispatch_without_gradient load_on_rank0 balance_differs
            double_reduction rate_differs same_data empty_expert rank_killed stuck_outside slow_data
        """),
        variants=_words("plain dead_expert expert_parallel aux_loss broadcast no_balance"),
        modules={
            "unused_parameter": "moe.experts.3",
            "layer_ignored": "moe.router.weight",
            "load_on_rank0": "moe.experts.1.up.weight",
            "balance_differs": "moe.bias",
            "dispatch_without_gradient": "moe",
        },
    ),
    Program(
        name="plain_loop",
        title="recurrent model without DDP: the program reduces gradients itself and keeps a moving average",
        faults=_words("""
            partial_reduction no_reduction reduced_too_early sum_not_mean none_on_one_rank other_seed moments_differ
            average_differs step_twice overwritten decay_differs rate_differs clip_on_one_rank local_skip no_zero_grad
            loss_not_divided nan_on_one_rank same_data no_set_epoch rank_killed rank_stopped stuck_outside exit_early
            slow_backward slow_data wrong_divisor broadcast_gradients reduced_after_step labels_ignored
            clears_each_piece frozen_moves clip_before_reduction
        """),
        variants=_words("plain flat asynchronous broadcast sgd rmsprop global_skip"),
        modules={
            "partial_reduction": "norm",
            "none_on_one_rank": "style",
            "overwritten": "norm.weight",
            "average_differs": "center",
            "frozen_moves": "tokens",
        },
    ),
    Program(
        name="local_sgd",
        title="local SGD: weights are averaged every four steps",
        faults=_words("""
            average_misses_layer sum_not_mean other_interval other_seed stale_optimizer rate_differs nan_on_one_rank
            same_data no_set_epoch rank_killed stuck_outside slow_backward slow_data
        """),
        variants=_words("plain every_step moments_too outer_momentum"),
        modules={"average_misses_layer": "outer"},
    ),
    Program(
        name="gan",
        title="generator and discriminator, two DDPs, two optimizers",
        faults=_words("""
            module_forward stale_optimizer two_owners leaked_gradient rate_differs overwritten same_data rank_killed
            stuck_outside slow_forward slow_data
        """),
        variants=_words("plain toggled plain_judge critic_twice rmsprop"),
        modules={"overwritten": "layers.2.bias"},
    ),
    Program(
        name="lbfgs",
        title="L-BFGS with a closure under DDP",
        faults=_words("""
            module_forward no_zero_grad local_decision rate_differs same_data overwritten rank_killed stuck_outside
            slow_backward
        """),
        variants=_words("plain line_search"),
        modules={"overwritten": "2.bias"},
    ),
    Program(
        name="amp",
        title="mixed precision: fp16 with a GradScaler, bfloat16, master weights",
        faults=_words("""
            clip_before_unscale steps_beside_scaler inf_on_one_rank underflow update_rounds_away module_forward
            double_reduction rate_differs rank_killed stuck_outside
        """),
        variants=_words("plain bf16 no_clip grows starts_too_high pure_bf16 master_weights"),
        modules={"inf_on_one_rank": "conv"},
    ),
    Program(
        name="two_tower",
        title="contrastive towers whose features are gathered from all ranks",
        faults=_words("""
            gather_without_gradient detached module_forward tower_forgotten load_on_rank0 double_reduction same_data
            no_set_epoch shape_mismatch rank_killed stuck_outside slow_backward slow_data
        """),
        variants=_words("plain own_rows_kept own_rows_loss local_negatives locked_image fixed_temperature"),
        modules={"detached": "text", "tower_forgotten": "text", "load_on_rank0": "text"},
    ),
    Program(
        name="fsdp2",
        title="small GPT under FSDP2 (fully_shard)",
        faults=_words("""
            optimizer_before_shard optimizer_of_unsharded local_norm layer_ignored rate_differs nan_on_one_rank
            same_data no_set_epoch uneven_batches rank_killed stuck_outside exit_early slow_backward slow_data
            left_in_eval loss_weighed
        """),
        variants=_words("plain tied mixed keep_gathered replicated_norm no_clip"),
        modules={"layer_ignored": "norm"},
    ),
    Program(
        name="resume",
        title="a run that saves in the middle of an epoch and a second start that loads",
        faults=_words("""
            resume_without_optimizer resume_empty_moments resume_without_scheduler resume_without_scaler
            resume_loads_nothing resume_replays load_into_copy load_on_rank0 moments_differ
            parts_without_optimizer
        """),
        variants=_words("plain prefix_removed fine_tune master_copy distributed_checkpoint"),
        generations=2,
    ),
    Program(
        name="lora",
        title="low-rank adapters by peft on a tiny Llama",
        faults=_words("""
            module_forward replaced_forward stale_optimizer unfreeze_after_wrap load_on_rank0
            nan_on_one_rank same_data rank_killed stuck_outside slow_forward slow_data
        """),
        variants=_words("plain dora head_too dropout checkpointing checkpointing_reentrant"),
        modules={"unfreeze_after_wrap": "base_model.model.lm_head"},
        needs=_words("transformers peft"),
    ),
    Program(
        name="hf_trainer",
        title="Trainer of Hugging Face with a tiny GPT-2",
        faults=_words("""
            module_forward stale_optimizer double_reduction token_imbalance overwritten rate_differs same_data
            local_decision rank_killed stuck_outside exception slow_forward slow_data
        """),
        variants=_words("""
            plain accumulation checkpointing saving evaluating bf16 constant smoothing stream stop_early
            frozen_embedding
        """),
        modules={"overwritten": "transformer.ln_f.weight"},
        needs=_words("transformers accelerate"),
    ),
    Program(
        name="accelerate_loop",
        title="loop with Accelerate",
        faults=_words("""
            scheduler_times_processes module_forward not_wrapped stale_optimizer load_on_rank0 sharded_twice same_data
            nan_on_one_rank rate_differs rank_killed stuck_outside slow_backward slow_data
        """),
        variants=_words("plain split_batches own_scheduler accumulation clipped"),
        needs=_words("accelerate datasets"),
    ),
    Program(
        name="lightning_module",
        title="LightningModule in Lightning's Trainer",
        faults=_words("""
            unfreeze_after_wrap load_on_rank0 double_reduction overwritten rate_differs same_data other_metrics
            save_with_barrier rank_killed stuck_outside exception slow_backward slow_data
        """),
        variants=_words("plain frozen manual synced_metrics scheduled accumulation clipped evaluating saving"),
        modules={"unfreeze_after_wrap": "backbone", "overwritten": "head.bias"},
        needs=_words("lightning"),
    ),
    Program(
        name="ledger",
        title="a ledger run of Ciuic: hub, agents and workers of two nodes, each a rank here",
        faults=_words("""
            base_differs residual_grows always_behind other_data late_layer detached no_zero_grad nan_on_one_rank
            clip_tiny scheduler_elsewhere
        """),
        variants=_words("""
            plain async one_bit int4 top_k pseudo_gradient gradient streamed elastic_join kill_and_return
        """),
        modules={"late_layer": "outer", "detached": "inner"},
        runner="cluster",
    ),
)
