"""The replay cases: pairs of a stored step with a strategy and a cluster, not all products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CLUSTERS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "1x1": [{"cpus": [0]}],
    "1x2": [{"cpus": [0, 1]}],
    "2x1": [{"cpus": [0]}, {"cpus": [0]}],
    "2x2": [{"cpus": [0, 1]}, {"cpus": [0, 1]}],
    "3x1": [{"cpus": [0]}, {"cpus": [0]}, {"cpus": [0]}],
    "4x1": [{"cpus": [0]}, {"cpus": [0]}, {"cpus": [0]}, {"cpus": [0]}],
    "2+1": [{"cpus": [0, 1]}, {"cpus": [0]}],
    "server": [{"cpus": [0]}, {"cpus": [0]}, {"cpus": []}],
    "one_machine": [{"cpus": [0, 1], "workers": 2}],
    "gpus": [{"gpus": [0, 1]}, {"gpus": [0, 1]}],
}
"""Nodes; the first is the chief's."""

_ALL = {"min_partition_bytes": 1}

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "shuffle": {"builder": "AllReduce", "all_reduce_spec": "SHUFFLE"},
    "small_groups": {"builder": "AllReduce", "chunk_size": 1},
    "hierarchical": {"builder": "AllReduce", "all_reduce_spec": "HIERARCHICAL"},
    "ring": {"builder": "AllReduce", "all_reduce_spec": "RING"},
    "nccl": {"builder": "AllReduce", "all_reduce_spec": "NCCL"},
    "float16": {"builder": "AllReduce", "compressor": {"kind": "FLOAT16", "error_feedback": True}},
    "bfloat16": {"builder": "AllReduce", "compressor": "BFLOAT16"},
    "power_sgd": {"builder": "AllReduce", "compressor": {"kind": "POWER_SGD", "rank": 1}},
    "int8": {"builder": "AllReduce", "compressor": "INT8"},
    "float8": {"builder": "AllReduce", "compressor": {"kind": "FLOAT8", "block": 16, "error_feedback": True}},
    "top_k": {"builder": "AllReduce", "compressor": {"kind": "TOP_K", "fraction": 0.2}},
    "ps": {"builder": "PS"},
    "ps_last": {"builder": "PS", "owner": 1},
    "proxies": {"builder": "PS", "local_proxy_variable": True},
    "stale": {"builder": "PS", "staleness": 2},
    "stale_proxies": {"builder": "PS", "owner": 1, "staleness": 1, "local_proxy_variable": True},
    "asynchronous": {"builder": "PSLoadBalancing", "sync": False, "local_proxy_variable": False},
    "asynchronous_bounded": {
        "builder": "PSLoadBalancing",
        "sync": False,
        "staleness": 2,
        "local_proxy_variable": False,
    },
    "asynchronous_proxies": {"builder": "PS", "sync": False, "local_proxy_variable": True},
    "ps_load_balancing": {"builder": "PSLoadBalancing"},
    "parallax": {"builder": "Parallax", "local_proxy_variable": False},
    "parallax_float16": {"builder": "Parallax", "compressor": "FLOAT16", "local_proxy_variable": True},
    "partitioned_ps": {"builder": "PartitionedPS", "max_shards": 3, **_ALL},
    "partitioned_proxies": {"builder": "PartitionedPS", "max_shards": 2, "local_proxy_variable": True, **_ALL},
    "uneven_partitioned_ps": {"builder": "UnevenPartitionedPS", "max_shards": 3, **_ALL},
    "partitioned_stale": {
        "builder": "UnevenPartitionedPS",
        "max_shards": 2,
        "staleness": 1,
        "local_proxy_variable": False,
        **_ALL,
    },
    "partitioned_ar": {"builder": "PartitionedAR", "max_shards": 2, **_ALL},
    "random_axis_ar": {"builder": "RandomAxisPartitionAR", "max_shards": 3, "seed": 1, **_ALL},
    "sharded": {"builder": "ShardedAllReduce", **_ALL},
    "sharded_int8": {"builder": "ShardedAllReduce", "value_compressor": "INT8", **_ALL},
    "fsdp": {"builder": "FSDP", "prefetch": 0, **_ALL},
    "diloco": {"builder": "DiLoCo", "local_steps": 2},
    "local_dense": {
        "builder": "PS",
        "variables": {".*kernel.*": {"synchronizer": "AllReduce", "local_steps": 3, "compressor": "BFLOAT16"}},
    },
    "overridden": {
        "builder": "AllReduce",
        "variables": {
            ".*kernel.*": {"synchronizer": "PS", "owner": 1, "partition": {"axis": 0, "shards": 2}},
            ".*bias.*": {"synchronizer": "AllReduce", "group": 7, "compressor": "BFLOAT16"},
        },
    },
    "pipeline": {"builder": "Pipeline", "micro_batches": 2, "schedule": "1F1B"},
    "pipeline_anew": {"builder": "Pipeline", "micro_batches": 2, "schedule": "1F1B", "recompute": True},
    "pipeline_calls": {"builder": "Pipeline", "micro_batches": 4, "schedule": "GPipe", "recompute": True},
    "pipeline_mesh": {
        "builder": "Pipeline",
        "micro_batches": 2,
        "schedule": "1F1B",
        "mesh": {"stage": 2, "model": 2},
        "variables": {".*dense/kernel": {"sharding": [None, "model"]}, ".*dense_1/kernel": {"sharding": ["model"]}},
    },
    "fsdp_recomputed": {"builder": "FSDP", "recompute": ["sequential"], **_ALL},
    "recomputed": {"builder": "AllReduce", "recompute": ["sequential"]},
    "mesh": {
        "builder": "Mesh",
        "mesh": {"data": -1, "model": 2},
        "variables": {
            ".*(query|key|value|dense)/kernel": {"sharding": [None, "model"]},
            ".*(attention_output|dense_1)/kernel": {"sharding": ["model"]},
        },
    },
    "mesh_fsdp": {
        "builder": "Mesh",
        "mesh": {"data": 2, "model": -1},
        "variables": {
            ".*dense/kernel": {"sharding": ["data", "model"]},
            ".*dense_1/kernel": {"sharding": ["model", "data"]},
        },
    },
    "mesh_slots": {
        "builder": "Mesh",
        "mesh": {"data": 2, "model": -1},
        "variables": {".*dense/kernel": {"sharding": [None, "model"]}, ".*dense_1/kernel": {"slots": "data"}},
    },
    "megatron": {"builder": "Megatron"},
    "two_paces": {
        "builder": "PS",
        "variables": {".*bias.*": {"synchronizer": "PS", "owner": 1, "staleness": 2}},
    },
}
"""The strategies, as in the YAML's section `strategy`."""


@dataclass(frozen=True)
class Case:
    """A replay case.

    Attributes:
        step: a stored one.
        strategy: a key of STRATEGIES.
        cluster: a key of CLUSTERS.
    """

    step: str
    strategy: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.step}-{self.strategy}-{self.cluster}"


_PAIRS: Mapping[str, str] = {
    "adamw": "partitioned_ps server",
    "aggregations": "shuffle 2x2, hierarchical 4x1",
    "attention": "shuffle 2x1, mesh 1x2, megatron 2x1",
    "clipped_rows": "partitioned_ps 2x2",
    "evaluation": "shuffle server",
    "fit_dropout": "pipeline 2x1, pipeline_anew 2x1, recomputed 1x2, fsdp_recomputed 2x1",
    "fit_ema": "fsdp 3x1",
    "fit_gradient_accumulation": "sharded 2x2",
    "fit_half_precision": "ps 2x2",
    "fit_loss_scale": "partitioned_ps 2x1",
    "fit_masked_lstm": "shuffle 2x2",
    "fit_metrics_and_validation": "shuffle 2+1, proxies 2x1",
    "fit_outputs_reduced_in_two_ways": "partitioned_ar 2x1",
    "fit_synchronized_norms": "shuffle 2x2",
    "function_embedding_adam_clipped": "shuffle 2x1, parallax 3x1",
    "generator": "shuffle 2+1",
    "graph_alternating_optimizers.1": "ps_load_balancing 2x1",
    "graph_alternating_optimizers.2": "ps_load_balancing 2x1, sharded 2x1",
    "graph_alternating_optimizers.3": "ps_load_balancing 2x2",
    "graph_convolution_momentum.1": "proxies 2x1",
    "graph_convolution_momentum.2": "shuffle 2x2, stale 2x1",
    "graph_embedding_adagrad.1": "partitioned_ps 2x1",
    "graph_embedding_adagrad.2": "parallax 2x2, partitioned_ps 2x1, shuffle 1x1",
    "graph_fetches.2": "two_paces 2x1",
    "graph_fetches.3": "ps_last 2x1, shuffle 2x2",
    "graph_fetches.4": "ps_load_balancing server",
    "graph_global_norm.2": "ps_load_balancing 2x2, uneven_partitioned_ps 2x1",
    "graph_initializable_iterator.1": "shuffle 2x1",
    "graph_initializable_iterator.2": "shuffle 2x1",
    "graph_initializable_iterator.3": "ps_last 2x1",
    "graph_loop.2": "ps_last 2x1, shuffle 2x2",
    "graph_terms_of_several_weights.2": "shuffle 2+1",
    "images": "shuffle 2x2",
    "jit_fit_recurrent": "ps_last 2x1",
    "jit_step": "shuffle one_machine, ps_load_balancing 2x1",
    "joined_rows": "shuffle 2x2",
    "keras_convolution_adam": "shuffle 1x2, nccl gpus, sharded 3x1, partitioned_stale 2x1",
    "keras_embedding_adagrad": (
        "parallax 2x2, parallax_float16 2x1, random_axis_ar 2+1, partitioned_proxies 2x1, asynchronous_proxies 2x1"
    ),
    "keras_mlp_adam_float32": (
        "shuffle 1x1, small_groups 2x1, float16 2x2, bfloat16 one_machine, overridden 2+1, sharded server, "
        "pipeline_calls 2x1, asynchronous 3x1, ps gpus, mesh 4x1, mesh_fsdp 2x2, mesh_slots 4x1, "
        "pipeline_mesh 4x1"
    ),
    "many_ops": "shuffle 2x1",
    "momentum_and_counter": "uneven_partitioned_ps 3x1, stale 2x1, diloco 2x2",
    "rmsprop": "partitioned_ar 2x1, asynchronous_bounded 3x1",
    "sampled_classes": "parallax 2x1",
    "scattered_state": "shuffle 2x1",
    "step_cotangents_adversarial": "shuffle 2x2",
    "step_cotangents_clip_gradient_of_weights": "shuffle 2x1",
    "step_cotangents_clip_under_a_mask": "ps 2x1",
    "step_cotangents_two_groups": "sharded 2x1, sharded_int8 3x1, asynchronous 2x1",
    "step_large_matrix": "sharded one_machine, shuffle 1x2, ring 2x1",
    "step_mean_and_penalty": "shuffle 2+1",
    "step_nested_functions": "ps_last 2x1, top_k 2x2, int8 2x1, float8 2x1",
    "step_odd_types": "shuffle 2x2, partitioned_ps 2x1, float16 2x1",
    "step_repeated_ids": "shuffle 1x2, ring 2x1, local_dense 2x1",
    "step_scalar_variable": "ps_load_balancing 2x1, ring 2x1",
    "step_statistics": "ps 2x2",
    "step_two_optimizers": "power_sgd 2x1, stale_proxies 2x1",
    "sums_asked_of_distribute": "ring 2x2",
    "sums_in_adversaries": "shuffle 2x1",
    "sums_in_masked_loss": "ps 2+1",
    "update_by_loss": "shuffle 2x1",
}
"""For each step, the strategy and machines that rewrite it: the most demanding ones."""


CASES: Mapping[str, Case] = {
    str(case): case
    for step, pairs in _PAIRS.items()
    for pair in pairs.split(", ")
    for case in [Case(step, *pair.split())]
}
