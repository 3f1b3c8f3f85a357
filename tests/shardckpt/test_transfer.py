"""Tests of the executor: it moves what the plan says, finds damage, and fails as a whole."""

from __future__ import annotations

import contextlib
import errno
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.batches import Sizes
from shardckpt.catalogue import CatalogueBuilder, File, Tensor
from shardckpt.checksum import crc32c
from shardckpt.endpoints import Bytes, FileSink, MemorySink, MemorySource, ReaderPool, Sink, Source
from shardckpt.errors import CorruptError, FormatError, NoSpaceError, StorageError
from shardckpt.local_store import LocalStore, LocalWriter
from shardckpt.plan import Plan, plan
from shardckpt.region import Box, Region, Span
from shardckpt.storage import Store, Writer, open_store
from shardckpt.transfer import TransferOptions, transfer
from tests.shardckpt.tilings import Arrays, Tiled, arrays, elements, shifted, tilings, with_recorded_crc, wrong_chunks

HEADER = b"8 bytes!"
TINY = Sizes(piece_bytes=24, step_bytes=8, batch_bytes=32, max_gap_bytes=4)

two_tilings = arrays().flatmap(lambda whole: st.tuples(st.just(whole), tilings(whole), tilings(whole)))
options = st.builds(
    TransferOptions,
    budget_bytes=st.sampled_from([64, 256, 4096]),
    num_workers=st.integers(1, 3),
    sizes=st.sampled_from([TINY, Sizes(piece_bytes=8, step_bytes=16, batch_bytes=8, max_gap_bytes=0), Sizes()]),
)


class CopyingSource(Source):
    """Memory that is handed out as copies, as a file or device does."""

    def __init__(self, data: Bytes) -> None:
        self.data = data

    def fetch(self, byte_offset: int, out: Bytes) -> Bytes:
        """Fill `out`."""
        out[:] = self.data[byte_offset : byte_offset + len(out)]
        return out


@contextlib.contextmanager
def sources_of(kind: str, files: list[Bytes], folder: Path) -> Iterator[list[Source]]:
    """Give sources of a kind over these bytes."""
    if kind == "file":
        store = open_store(folder)
        for number, data in enumerate(files):
            store.put(f"in-{number}", data.tobytes())
        pool = ReaderPool(store, max_open=1)
        with contextlib.closing(pool):
            yield pool.sources([f"in-{number}" for number in range(len(files))])
    else:
        yield [MemorySource(data) if kind == "memory" else CopyingSource(data) for data in files]


@pytest.mark.parametrize("source_kind", ["memory", "copying", "file"])
@pytest.mark.parametrize("sink_kind", ["memory", "local", "sequential"])
@given(case=two_tilings, chosen=options)
def test_every_byte_arrives_with_its_checksum(
    tmp_path_factory: pytest.TempPathFactory,
    source_kind: str,
    sink_kind: str,
    case: tuple[Arrays, Tiled, Tiled],
    chosen: TransferOptions,
) -> None:
    """Whatever the tilings, ends, sizes and workers: the bytes, checksums and sums are right."""
    whole, source, target = case
    folder = tmp_path_factory.getbasetemp() / f"{source_kind}-{sink_kind}"
    store = open_store("memory://transfer" if sink_kind == "sequential" else folder)
    wanted = target.catalogue if sink_kind == "memory" else shifted(target.catalogue, len(HEADER))
    buffers = [np.full_like(file, 0xEE) for file in target.files]
    sinks: list[Sink] = [MemorySink(buffer) for buffer in buffers]
    if sink_kind != "memory":
        sinks = [FileSink(store, f"out-{i}", HEADER, len(HEADER) + len(data)) for i, data in enumerate(buffers)]
    with sources_of(source_kind, source.files, folder) as sources:
        report = transfer(plan(source.catalogue, wanted), sources, sinks, options=chosen)
    if sink_kind != "memory":
        for sink in sinks:
            sink.commit()
        content = [store.get(f"out-{i}", max_nbytes=1 << 20) for i in range(len(buffers))]
        assert all(data.startswith(HEADER) for data in content)
        buffers = [np.frombuffer(data, np.uint8) for data in content]
    assert wrong_chunks(wanted, whole, buffers) == []
    assert report.target_crc.tolist() == with_recorded_crc(wanted, buffers).chunk_crc.tolist()
    assert report.nbytes == sum(array.nbytes for array in whole.values())
    assert report.nbytes or not report.unchecked_nbytes


@given(two_tilings, options, st.data())
def test_a_flipped_bit_is_found_or_told_to_be_unchecked(
    case: tuple[Arrays, Tiled, Tiled], chosen: TransferOptions, data: st.DataObject
) -> None:
    """Damage never passes as good: it is refused, or lies in bytes that the report counts as unchecked."""
    _, source, target = case
    full = [i for i, file in enumerate(source.files) if len(file)]
    if not full:
        return
    file = source.files[data.draw(st.sampled_from(full))]
    file[data.draw(st.integers(0, len(file) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    sinks = [MemorySink(np.empty_like(file)) for file in target.files]
    is_found = False
    try:
        report = transfer(plan(source.catalogue, target.catalogue), memory_of(source), sinks, options=chosen)
    except CorruptError as error:
        is_found = "Restore the file from a copy, or use an earlier checkpoint." in str(error)
    assert is_found or report.unchecked_nbytes or len(report.partial.chunk)


def memory_of(tiled: Tiled) -> list[MemorySource]:
    """Give sources over the files of a tiling."""
    return [MemorySource(file) for file in tiled.files]


# Known cases --------------------------------------------------------------------------------------------------------


def cut(shape: tuple[int, ...], regions: list[Region], *, header: int = 0) -> Tiled:
    """Give a tensor 'w' of bytes, each region in a file of its own, with checksums."""
    whole = np.arange(int(np.prod(shape)), dtype=np.uint8).reshape(shape)
    builder = CatalogueBuilder()
    builder.add_tensor(Tensor("w", "U8", shape))
    files = []
    for region in regions:
        part = elements(whole, region).reshape(-1)
        number = builder.add_file(File(f"file-{len(files)}", header + part.nbytes, header))
        builder.add_chunk(0, region, file=number, byte_offset=0)
        files.append(part.copy())
    return Tiled(shifted(with_recorded_crc(builder.build(), files), header), files)


def rows(n: int, each: int = 64) -> list[Region]:
    """Give n adjacent spans."""
    return [Span(i * each, (i + 1) * each) for i in range(n)]


def columns(n: int, num_rows: int = 16, each: int = 4) -> list[Region]:
    """Give n adjacent column boxes."""
    return [Box((0, i * each), (num_rows, each)) for i in range(n)]


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((512,), rows(8), rows(16, 32)),
        ((512,), rows(16, 32), rows(8)),
        ((512,), rows(8), rows(1, 512)),
        ((16, 32), columns(8), rows(1, 512)),
        ((16, 32), columns(8), rows(8)),
    ],
)
def test_every_flipped_bit_is_found_in_reshard_and_consolidation(
    shape: tuple[int, ...], source: list[Region], target: list[Region]
) -> None:
    """Between flat layouts, and from columns to rows, every byte is under a checksum; the error names its place."""
    wanted = plan(cut(shape, source).catalogue, cut(shape, target).catalogue)
    for position in range(0, 512, 7):
        tiled = cut(shape, source)
        number, at = divmod(position, 512 // len(source))
        tiled.files[number][at] ^= 1 << position % 8
        sinks = [MemorySink(np.empty(512 // len(target), np.uint8)) for _ in target]
        text = (
            rf"damaged: .* of 'w' .* in 'file-{number}' has checksum [0-9a-f]{{8}}, recorded is [0-9a-f]{{8}}\. Restore"
        )
        with pytest.raises(CorruptError, match=text):
            transfer(wanted, memory_of(tiled), sinks, options=TransferOptions(sizes=TINY, budget_bytes=256))


def test_more_than_one_damaged_chunk_is_counted() -> None:
    """The first is named, the others are counted."""
    tiled = cut((512,), rows(8))
    for number in (2, 3, 5):
        tiled.files[number][0] ^= 1
    with pytest.raises(CorruptError, match=r"in 'file-2' .*\(2 more chunks are damaged too\)"):
        transfer(plan(tiled.catalogue, tiled.catalogue), memory_of(tiled), memory_sinks(8))


def memory_sinks(n: int, each: int = 64) -> list[MemorySink]:
    """Give n buffers to fill."""
    return [MemorySink(np.empty(each, np.uint8)) for _ in range(n)]


def test_verification_can_be_left_out() -> None:
    """Who asks for it gets the bytes as they are."""
    tiled = cut((512,), rows(8))
    tiled.files[2][0] ^= 1
    unverified = TransferOptions(is_verified=False)
    report = transfer(plan(tiled.catalogue, tiled.catalogue), memory_of(tiled), memory_sinks(8), options=unverified)
    assert report.target_crc[2] == crc32c(tiled.files[2])


def test_ranges_that_were_read_in_part_are_handed_back() -> None:
    """A chunk of which only a part was wanted could not be compared, and the report says so."""
    tiled = cut((512,), rows(8))
    wanted = cut((512,), [Span(0, 64), Span(70, 80)]).catalogue
    report = transfer(plan(tiled.catalogue, wanted), memory_of(tiled), memory_sinks(2))
    assert (report.partial.chunk.tolist(), report.partial.begin.tolist()) == ([1], [6])
    assert report.partial.nbytes.tolist() == [10]
    assert report.partial.crc.tolist() == [crc32c(tiled.files[1][6:16])]


def test_a_column_of_rows_is_counted_as_unchecked() -> None:
    """Runs with gaps between them have no checksum of their own; their bytes are counted."""
    tiled, wanted = cut((16, 32), rows(1, 512)), cut((16, 32), columns(8)[2:3])
    report = transfer(plan(tiled.catalogue, wanted.catalogue), memory_of(tiled), memory_sinks(1))
    assert report.unchecked_nbytes == 64
    assert report.target_crc.tolist() == wanted.catalogue.chunk_crc.tolist()


def test_chunks_without_a_recorded_checksum_pass() -> None:
    """What was never recorded cannot be compared."""
    tiled = cut((512,), rows(8))
    unrecorded = CatalogueBuilder()
    unrecorded.add_tensor(tiled.catalogue.tensors[0])
    for number, region in enumerate(rows(8)):
        unrecorded.add_file(tiled.catalogue.files[number])
        unrecorded.add_chunk(0, region, file=number, byte_offset=0)
    tiled.files[2][0] ^= 1
    transfer(plan(unrecorded.build(), tiled.catalogue), memory_of(tiled), memory_sinks(8))


def test_progress_adds_up() -> None:
    """The calls sum to the bytes copied."""
    tiled, done = cut((512,), rows(8)), []
    chosen = TransferOptions(sizes=TINY, num_workers=3, on_progress=done.append)
    report = transfer(plan(tiled.catalogue, tiled.catalogue), memory_of(tiled), memory_sinks(8), options=chosen)
    assert sum(done) == report.nbytes == 512
    assert len(done) > 8


@pytest.mark.parametrize("num_columns", [0, 8])
def test_memory_stays_within_the_budget(tmp_path: Path, num_columns: int) -> None:
    """However large the files, the buffers are those of the budget."""
    side = 6144
    regions: list[Region] = columns(num_columns, side, side // 8) if num_columns else rows(8, side * side // 8)
    target = [Span(0, side * side)]
    source = cut((side, side), regions)
    store = open_store(tmp_path)
    wanted = cut((side, side), target, header=len(HEADER)).catalogue
    chosen = TransferOptions(budget_bytes=8 << 20, num_workers=2)
    with sources_of("file", source.files, tmp_path) as sources:
        sink = FileSink(store, "out", HEADER, wanted.files[0].nbytes)
        tracemalloc.start()
        try:
            transfer(plan(source.catalogue, wanted), sources, [sink], options=chosen)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        sink.abort()
    assert peak < (8 << 20) + (1 << 20)


# Failures -----------------------------------------------------------------------------------------------------------


class FailingWriter(LocalWriter):
    """A writer that fails at a byte, or at the end."""

    def __init__(self, store: FailingStore, path: Path, nbytes: int) -> None:
        self.store = store
        super().__init__(path, nbytes)

    def write(self, byte_offset: int, data: Bytes | bytes) -> None:
        """Fail when the store has taken all it can."""
        self.store.room -= len(data)
        if self.store.room < 0:
            raise StorageError.wrap("write", self.path, OSError(self.store.number, "injected"))
        super().write(byte_offset, data)

    def finish(self) -> None:
        """Fail at the end."""
        if self.store.fails_at_finish:
            raise StorageError.wrap("write", self.path, OSError(self.store.number, "injected"))
        super().finish()


class FailingStore(LocalStore):
    """A local store with room for a number of bytes."""

    def __init__(self, root: Path, number: int, room: int = 1 << 40, *, fails_at_finish: bool = False) -> None:
        super().__init__(root)
        self.number, self.room, self.fails_at_finish = number, room, fails_at_finish

    def create(self, path: str, *, nbytes: int) -> Writer:
        """Give a writer that fails."""
        return FailingWriter(self, self.root / path, nbytes)


def eight_files() -> tuple[Plan, Tiled]:
    """Give the plan that copies eight files to eight files behind a header."""
    tiled = cut((512,), rows(8))
    return plan(tiled.catalogue, cut((512,), rows(8), header=len(HEADER)).catalogue), tiled


def run_into(store: Store, sources: list[Source] | None = None, **change: object) -> None:
    """Copy eight files into a store."""
    wanted, tiled = eight_files()
    sinks = [FileSink(store, f"out-{i}", HEADER, file.nbytes) for i, file in enumerate(wanted.target.files)]
    chosen = TransferOptions(sizes=TINY, num_workers=3, **change)  # type: ignore[arg-type]
    transfer(wanted, sources or memory_of(tiled), sinks, options=chosen)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, NoSpaceError), (errno.EIO, StorageError)])
@pytest.mark.parametrize("room", [0, 8, 100, 300, 8 * 72 - 1])
def test_a_failed_write_leaves_nothing(tmp_path: Path, number: int, kind: type[StorageError], room: int) -> None:
    """Wherever the disk fails or fills up, all files are taken back, and the error names one."""
    store, before = FailingStore(tmp_path, number, room), threading.active_count()
    with pytest.raises(kind, match=r"cannot write '.*/out-\d'") as caught:
        run_into(store)
    assert caught.value.errno == number
    assert store.list() == {}
    assert threading.active_count() == before


def test_a_failed_sync_leaves_nothing(tmp_path: Path) -> None:
    """An error that only the end of a file shows is an error of the whole."""
    store = FailingStore(tmp_path, errno.EIO, fails_at_finish=True)
    with pytest.raises(StorageError, match="injected"):
        run_into(store)
    assert store.list() == {}


class RaisingSource(Source):
    """A source that fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def fetch(self, byte_offset: int, out: Bytes) -> Bytes:
        """Fail."""
        raise self.error


@pytest.mark.parametrize("error", [StorageError("gone"), ValueError("a bug"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("root", ["memory://raising", ""])
def test_a_source_that_raises_ends_the_transfer(tmp_path: Path, error: BaseException, root: str) -> None:
    """The very error of the source arrives, from whichever thread, and nothing is left."""
    store, before = open_store(root or tmp_path), threading.active_count()
    sources: list[Source] = [*memory_of(eight_files()[1])[:7], RaisingSource(error)]
    with pytest.raises(type(error)) as caught:
        run_into(store, sources)
    assert caught.value is error
    assert store.list() == {}
    assert threading.active_count() == before


def test_a_progress_bar_that_raises_ends_the_transfer(tmp_path: Path) -> None:
    """An interrupt while progress is shown takes everything back."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    store = open_store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_into(store, on_progress=interrupt)
    assert store.list() == {}


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink])
def test_a_source_file_that_is_short_or_gone_ends_the_transfer(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """No file is filled up with zeros: the error names what is truncated or missing."""
    store = open_store(tmp_path / "out")
    with sources_of("file", eight_files()[1].files, tmp_path / "in") as sources:
        change(tmp_path / "in/in-6")
        with pytest.raises((FormatError, FileNotFoundError), match=r"in-6'"):
            run_into(store, sources)
    assert store.list() == {}


def test_damage_in_the_source_leaves_nothing(tmp_path: Path) -> None:
    """Files are not committed by a transfer, and a mismatch takes them back."""
    wanted, tiled = eight_files()
    tiled.files[7][5] ^= 4
    store = open_store(tmp_path)
    sinks = [FileSink(store, f"out-{i}", HEADER, file.nbytes) for i, file in enumerate(wanted.target.files)]
    with pytest.raises(CorruptError):
        transfer(wanted, memory_of(tiled), sinks)
    assert store.list() == {}
