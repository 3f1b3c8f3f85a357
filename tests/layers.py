"""The table of layers: which file may import which. Data only; `test_layers.py` holds the code to it.

A new file gets a line here: put it on the lowest floor that is above everything it imports.
"""

from __future__ import annotations

FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sharding": (
        ("errors", "layout", "names", "policy", "collectives"),
        ("bucket", "wrap"),
        ("unit",),
        ("runtime",),
    ),
    "shardckpt": (
        ("errors", "checksum", "retry"),
        ("region", "dtypes", "names", "coordinate", "store"),
        ("catalogue", "local_store", "fsspec_store", "s3_client"),
        ("layout", "plan", "s3_object"),
        ("dtensors", "s3_store"),
        ("shard", "storage"),
        ("container", "endpoints", "optimizer_state"),
        ("manifest", "shard_file", "tensors", "transfer"),
        ("committed", "merge", "objects"),
        ("write_files", "checkpoint", "state", "formats/*"),
        ("wanted",),
        ("saving", "loading", "tools/companions", "tools/rewrite", "tools/selection"),
        ("tools/*",),
        ("cli/options", "cli/output"),
        ("cli/verb", "cli/writing", "cli/main"),
        ("cli/*",),
        ("__init__",),
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
            "optimizer_state",
            "saving",
            "shard",
            "state",
            "tensors",
            "wanted",
        ),
        "click": ("cli/*",),
        "rich": ("cli/*",),
        "fsspec": ("fsspec_store", "s3_client"),
        "s3fs": (),
        "botocore": ("s3_client", "s3_object"),
        "threading": ("transfer", "endpoints", "s3_store"),
        "concurrent": ("transfer",),
        "multiprocessing": (),
        "pickle": (),
    },
}
"""Package -> what is imported -> the files that may. The longest name that fits counts."""

COLLECTIVES_IN: dict[str, tuple[str, ...]] = {"sharding": ("collectives",), "shardckpt": ("coordinate",)}
"""Package -> the files that may issue collectives."""

MAY_TOUCH_PRIVATE: dict[tuple[str, str], str] = {
    ("shardckpt/coordinate", "_get_default_store"): "torch has no public way to the store that its ranks share",
    ("shardckpt/coordinate", "torch._C._distributed_c10d"): "the only home of the error that this store raises",
}
"""(File, private name) -> why there is no other way."""
