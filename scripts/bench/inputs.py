"""Made-up checkpoints to measure with: weights as a language model has them, in several layouts."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.committed import Draft, commit, prepare
from shardckpt.container import build_header, read_header
from shardckpt.endpoints import MemorySource
from shardckpt.layout import Bucket, Layout, regions
from shardckpt.region import Box, normalise, whole
from shardckpt.shard_file import lay_out_shards
from shardckpt.storage import open_store
from shardckpt.transfer import TransferOptions
from shardckpt.write_files import write_files

HIDDEN, INNER, VOCABULARY = 2048, 5632, 4096


def weights(nbytes: int, dtype: str) -> list[list[Tensor]]:
    """Give the tensors of a Llama-like model of about `nbytes`, by unit: embedding, blocks, head."""
    item = {"F32": 4, "BF16": 2}[dtype]
    matrices = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    embedding = [Tensor("model.embed_tokens.weight", dtype, (VOCABULARY, HIDDEN))]
    block_nbytes = sum(a * b for a, b in matrices.values()) * item
    blocks = [
        [Tensor(f"model.layers.{i}.{name}.weight", dtype, shape) for name, shape in matrices.items()]
        + [Tensor(f"model.layers.{i}.{name}.weight", dtype, (HIDDEN,)) for name in ("input_norm", "output_norm")]
        for i in range(max(1, (nbytes - embedding[0].nbytes) // block_nbytes))
    ]
    return [embedding, *blocks, [Tensor("model.norm.weight", dtype, (HIDDEN,))]]


def write_flat(root: Path, *, nbytes: int, ranks: int, with_adam: bool) -> int:
    """Write a checkpoint as `ranks` ranks of fully sharded training leave it, a unit a block; give its bytes.

    With Adam, `nbytes` are those of weights and both moments together, all in float32.
    """
    units = weights(nbytes // 3 if with_adam else nbytes, "F32" if with_adam else "BF16")
    tensors: list[Tensor] = []
    buckets = []
    for unit in units:
        columns = []
        for prefix, suffix in [("model.", "")] + (
            [("optimizer.state.", f".{m}") for m in MOMENTS] if with_adam else []
        ):
            columns.append([len(tensors) + i for i in range(len(unit))])
            tensors += [Tensor(f"{prefix}{t.name}{suffix}", t.dtype, t.shape) for t in unit]
        buckets.append(Bucket(8, [t.numel for t in unit], [1] * len(unit), columns))
    layout = Layout(buckets, [])
    sections = {"model": "module", **({"optimizer": "optimizer"} if with_adam else {})}
    draft = Draft(1000, ranks, sections, tuple(tensors), layout, {})
    files = lay_out_shards(tensors, regions(layout, tensors, ranks), draft.naming(""))
    builder = CatalogueBuilder()
    pool = random_bytes(max(t.nbytes for t in tensors))
    for tensor in tensors:
        index, file = builder.add_tensor(tensor), builder.add_file(File(tensor.name, tensor.nbytes, 0))
        builder.add_chunk(index, whole(tensor.shape), file=file, byte_offset=0)
    sources = [MemorySource(pool[: tensor.nbytes]) for tensor in tensors]
    destination = prepare(open_store(root), overwrite=False)
    written = write_files(builder.build(), sources, files, destination.store, options=TransferOptions())
    commit(destination, draft, written.catalogue, written.headers_crc)
    return written.nbytes


MOMENTS = ("exp_avg", "exp_avg_sq")


def write_cut(folder: Path, *, nbytes: int, shards: int, dim: int) -> int:
    """Write weights as safetensors files, each matrix cut along `dim`, as DCP's Hugging Face writer leaves them."""
    folder.mkdir(parents=True)
    tensors = [tensor for unit in weights(nbytes, "BF16") for tensor in unit]
    pool, total = random_bytes(max(t.nbytes for t in tensors)), 0
    for shard in range(shards):
        rows = [(t, box) for t in tensors for box in _cut(t, shards, dim)[shard : shard + 1]]
        sharding = {t.name: {"saved_offsets": list(box.offset)} for t, box in rows}
        header, _ = build_header(
            [(t.name, t.dtype, box.shape) for t, box in rows], {"DCP_SHARDING_INFO": json.dumps(sharding)}
        )
        with (folder / f"shard-{shard:05}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(header)
            for _, box in rows:
                file.write(pool[: box.numel * 2].data)
            total += file.tell()
    return total


def _cut(tensor: Tensor, shards: int, dim: int) -> list[Box]:
    dim = min(dim, len(tensor.shape) - 1)
    size = tensor.shape[dim] // shards
    assert size * shards == tensor.shape[dim]
    shape = tuple(size if d == dim else n for d, n in enumerate(tensor.shape))
    return [Box(tuple(i * size if d == dim else 0 for d in range(len(shape))), shape) for i in range(shards)]


def read_cut(folder: Path) -> Catalogue:
    """Give the catalogue of such files."""
    store = open_store(folder)
    builder = CatalogueBuilder()
    found = []
    shapes: dict[str, tuple[str, list[int]]] = {}
    for path, nbytes in store.list().items():
        with closing(store.open_reader(path)) as reader:
            header = read_header(reader)
        offsets = json.loads(header.metadata["DCP_SHARDING_INFO"])
        file = builder.add_file(File(path, nbytes, header.nbytes))
        for entry in header.entries:
            offset = offsets[entry.key]["saved_offsets"]
            ends = [o + n for o, n in zip(offset, entry.shape, strict=True)]
            shape = shapes.setdefault(entry.key, (entry.dtype, ends))[1]
            shape[:] = [max(a, b) for a, b in zip(shape, ends, strict=True)]
            found.append((entry, Box(tuple(offset), entry.shape), file))
    index = {name: builder.add_tensor(Tensor(name, d, tuple(shape))) for name, (d, shape) in shapes.items()}
    for entry, box, file in found:
        shape = builder.tensors[index[entry.key]].shape
        region = normalise(box, shape, fqn=entry.key)
        builder.add_chunk(index[entry.key], region, file=file, byte_offset=entry.begin)
    return builder.build()


def random_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Give bytes that no file system can squeeze."""
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
