"""Dividing files among processes."""

from __future__ import annotations

import numpy as np

from shardckpt.catalogue import NO_CRC, Tensor
from shardckpt.formats.huggingface import lay_out_files
from shardckpt.tools.shares import cut_out, divide, put_together

SIZES = (10**6, 10, 600_000, 500_000, 0)
FILES = lay_out_files([(str(n), [Tensor(f"t{n}", "U8", (size,))]) for n, size in enumerate(SIZES)])


def test_files_are_shared_out_by_bytes() -> None:
    """The largest first; some get none where there are few."""
    assert divide(FILES, 1) == [[0, 1, 2, 3, 4]]
    assert sorted(number for share in divide(FILES, 2) for number in share) == [0, 1, 2, 3, 4]
    loads = [sum(FILES.catalogue.files[number].nbytes for number in share) for share in divide(FILES, 2)]
    assert max(loads) < 1.15 * min(loads)
    assert [len(share) for share in divide(FILES, 7)].count(0) == 2


def test_shares_come_together_again() -> None:
    """Each chunk has the checksum that its share gave it."""
    parts = []
    for numbers in divide(FILES, 3):
        share = cut_out(FILES, numbers)
        assert [file.path for file in share.files.catalogue.files] == [str(number) for number in numbers]
        assert len(share.files.headers) == len(numbers)
        parts.append((share.chunks, share.chunks + 100))
    assert put_together(FILES, parts).chunk_crc.tolist() == list(range(100, 104))
    assert put_together(FILES, parts[:1]).chunk_crc.tolist().count(NO_CRC) == 4 - len(parts[0][0])
    assert np.array_equal(np.sort(np.concatenate([chunks for chunks, _ in parts])), np.arange(4))
