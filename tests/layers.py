"""The table of layers: which file may import which. Data only; `test_layers.py` holds the code to it.

A new file gets a line here: put it on the lowest floor that is above everything it imports.
"""

from __future__ import annotations

FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sharding": (
        ("errors", "layout", "names", "policy", "comm_hook", "pool", "sharded_tensor", "state_options"),
        ("collectives",),
        ("bucket", "disk_optimizer", "mesh", "sharded_grad_scaler", "watch", "wrap"),
        ("activation", "agreement", "full_precision", "settings"),
        ("unit",),
        ("clip", "runtime", "state_dict", "state_hooks", "summon"),
        ("hooks", "optimizer_state"),
        ("assignment",),
        ("functional", "initial"),
        ("fsdp_states",),
        ("fsdp",),
        ("__init__",),
    ),
    "shardckpt": (
        ("errors", "checksum", "retry"),
        ("region", "dtypes", "elements", "names", "coordinate", "preemption", "retention", "store"),
        ("catalogue", "local_store", "fsspec_store", "s3_client", "team"),
        ("layout", "parts", "plan", "s3_object"),
        ("dtensors", "part_copies", "s3_store"),
        ("batches", "shard", "storage"),
        ("container", "endpoints", "optimizer_state"),
        ("copier",),
        ("conversion", "manifest", "shard_file", "tensors", "transfer"),
        ("committed", "derivation", "per_rank", "staging"),
        ("merge", "objects"),
        ("write_files", "checkpoint", "state", "formats/*"),
        ("wanted", "formats/origin", "rules"),
        ("loading", "save_phases", "tools/companions", "tools/segments", "tools/selection", "tools/shares"),
        (
            "saving",
            "save_async",
            "tools/adapters",
            "tools/architecture",
            "tools/holdings",
            "tools/recast",
            "tools/relayout",
            "tools/soundness",
            "tools/rewrite",
            "tools/templates",
            "tools/wrappers",
        ),
        ("tools/fit", "tools/rules_file"),
        ("tools/name_rules",),
        ("manager",),
        ("tools/*", "cli/stopping", "cli/completion"),
        ("cli/options", "cli/output"),
        ("cli/verb", "cli/writing", "cli/main"),
        ("cli/*",),
        ("__init__", "__main__"),
    ),
}
"""Package -> its files by floor, lowest first. A file imports lower floors of its package; a name beats a pattern."""

ONLY_IN: dict[str, dict[str, tuple[str, ...]]] = {
    "sharding": {
        "shardckpt": (),
    },
    "shardckpt": {
        "sharding": ("state",),
        "sharding.layout": ("layout",),
        "torch": (
            "checkpoint",  # only when a tensor is read
            "coordinate",
            "dtensors",
            "loading",
            "manager",
            "optimizer_state",
            "saving",
            "save_async",
            "shard",
            "staging",
            "state",
            "tensors",
            "tools/architecture",  # only when transformers is asked
            "wanted",
        ),
        "click": ("cli/*",),
        "rich": ("cli/*",),
        "fsspec": ("fsspec_store", "s3_client"),
        "s3fs": (),
        "botocore": ("s3_client", "s3_object"),
        "threading": ("transfer", "copier", "endpoints", "conversion", "s3_store", "coordinate", "save_async"),
        "concurrent": (),
        "multiprocessing": (),
        "pickle": (),
    },
}
"""Package -> what is imported -> the files that may. The longest name that fits counts."""

COLLECTIVES_IN: dict[str, tuple[str, ...]] = {"sharding": ("collectives",), "shardckpt": ("coordinate",)}
"""Package -> the files that may issue collectives."""

MAY_TOUCH_PRIVATE: dict[tuple[str, str], str] = {
    ("sharding/policy", "_module_classes_to_ignore"): "torch's own name of this argument",
    ("sharding/policy", "_BatchNorm"): "torch's own name of the classes that its MixedPrecision excepts",
    (
        "sharding/bucket",
        "_parameters",
    ): "assigning through `Module.__setattr__` would register, check and copy each time",
    (
        "sharding/bucket",
        "_post_accumulate_grad_hooks",
    ): "torch offers hooks for when gradients are there, and no public way to call them",
    ("sharding/bucket", "_version"): "torch counts changes of a tensor there and nowhere else",
    ("sharding/fsdp", "_take"): "its own class: the other way to make one, around a module that is a unit already",
    ("sharding/full_precision", "_pytree"): "as of `sharding/hooks`",
    ("sharding/hooks", "_pytree"): "torch's walk over nested arguments has no public name",
    (
        "sharding/names",
        "_non_persistent_buffers_set",
    ): "torch has no public question for what is left out of a state dict",
    ("sharding/policy", "_HYBRID_SHARD_ZERO2"): "its own enum member, named as in torch",
    ("sharding/runtime", "_C"): "home of the next",
    ("sharding/runtime", "_current_graph_task_id"): "torch has no public way to ask whether autograd is running",
    ("sharding/runtime", "_execution_engine"): "the only way to be called when a backward pass ends",
    ("sharding/sharded_tensor", "torch.distributed._shard.metadata"): "the only home of the sharded tensor, as below",
    ("sharding/sharded_tensor", "torch.distributed._shard.sharded_tensor.api"): "as above",
    ("sharding/sharded_tensor", "torch.distributed._shard.sharded_tensor.metadata"): "as above",
    ("sharding/sharded_tensor", "torch.distributed._shard.sharded_tensor.shard"): "as above",
    (
        "sharding/sharded_tensor",
        "_init_from_local_shards_and_global_metadata",
    ): "the public constructor gathers what every rank can compute",
    ("shardckpt/coordinate", "_get_default_store"): "torch has no public way to the store that its ranks share",
    ("shardckpt/coordinate", "torch._C._distributed_c10d"): "the only home of the error that this store raises",
}
"""(File, private name) -> why there is no other way."""
