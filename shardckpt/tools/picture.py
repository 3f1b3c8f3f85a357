"""The picture of a checkpoint: what each rank holds, who holds which part of each tensor, what a reshard moves.

Knows SVG; refuses to know where the numbers come from. Every shape carries a title, which browsers show under the
mouse.
"""

from __future__ import annotations

import colorsys
import html
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardckpt.tools.holdings import Holdings, Strip

WIDTH = 1080
_MARGIN = 32
_LABEL_WIDTH = 300
_BAR_WIDTH = 540
_MAX_ROWS = 128
_MAX_STRIPS = 60
_KIND_COLORS = ("#3b6ea8", "#e08a3c", "#5aa469", "#b3557d", "#7a6fb0", "#9c8b4e", "#4fa3a5", "#8a8a8a")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

_STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #24292f; }
.title { font-size: 20px; font-weight: 600; }
.heading { font-size: 15px; font-weight: 600; }
.faint { fill: #6e7781; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
.track { fill: #eef1f4; }
.mean { stroke: #24292f; stroke-width: 1; stroke-dasharray: 3 3; }
"""


@dataclass
class _Canvas:
    """Elements from top to bottom."""

    y: float = _MARGIN
    elements: list[str] = field(default_factory=list)

    def text(self, x: float, text: str, *, kind: str = "", dy: float = 0, title: str = "") -> None:
        tip = f"<title>{html.escape(title)}</title>" if title else ""
        self.elements.append(f'<text x="{x:.1f}" y="{self.y + dy:.1f}" class="{kind}">{html.escape(text)}{tip}</text>')

    def box(self, at: tuple[float, float], size: tuple[float, float], color: str, title: str) -> None:
        (x, y), (width, height) = at, size
        shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        self.elements.append(f'{shape} fill="{color}"><title>{html.escape(title)}</title></rect>')

    def heading(self, text: str, note: str = "") -> None:
        self.y += 44
        self.text(_MARGIN, text, kind="heading")
        if note:
            self.y += 18
            self.text(_MARGIN, note, kind="faint")
        self.y += 14


def draw_svg(title: str, subtitle: str, found: Holdings, moved: NDArray[np.int64] | None = None) -> str:
    """Draw the whole picture.

    Args:
        title: Its first line.
        subtitle: Its second.
        found: What the ranks hold.
        moved: Bytes from each rank to each of another layout; None to leave that part out.
    """
    canvas = _Canvas()
    canvas.y += 8
    canvas.text(_MARGIN, title, kind="title")
    canvas.y += 20
    canvas.text(_MARGIN, subtitle, kind="faint")
    _draw_ranks(canvas, found)
    _draw_tensors(canvas, found)
    if moved is not None:
        _draw_moves(canvas, moved)
    height = canvas.y + _MARGIN
    body = "\n".join(canvas.elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}">\n<style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def draw_html(title: str, svg: str) -> str:
    """Put a picture on a page of its own."""
    style = "body { margin: 0; background: #f6f8fa; } svg { display: block; margin: 24px auto; max-width: 100%; }"
    head = (
        f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{style} rect:hover {{ opacity: .8 }}</style>'
    )
    return f"<!DOCTYPE html>\n<html><head>{head}</head>\n<body>\n{svg}</body></html>\n"


def bytes_text(nbytes: float) -> str:
    """Give a number of bytes for people, as `1.23 GB`."""
    power = 0
    while abs(nbytes) >= 999.5 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.3g} {_UNITS[power]}"


def rank_color(rank: int, num_ranks: int) -> str:
    """Give the color of a rank: once around the wheel, neighbours set apart by lightness."""
    hue = (0.60 + 0.84 * rank / max(num_ranks, 1)) % 1.0
    lightness = 0.52 if rank % 2 == 0 else 0.66
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.42)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


# Ranks --------------------------------------------------------------------------------------------------------------


def _draw_ranks(canvas: _Canvas, found: Holdings) -> None:
    by_rank = found.by_rank
    note = f"The fullest rank has {found.imbalance:.2f} times the mean of {bytes_text(float(by_rank.mean()))}."
    canvas.heading("What each rank holds", note)
    _draw_legend(canvas, found)
    per_row = -(-len(by_rank) // _MAX_ROWS)
    rows = [found.nbytes[first : first + per_row] for first in range(0, len(by_rank), per_row)]
    height = 16.0 if len(rows) <= 32 else 7.0
    largest = max(float(by_rank.max()), 1.0)
    left, width = _MARGIN + 90, WIDTH - 2 * _MARGIN - 90 - 150
    top = canvas.y
    for number, row in enumerate(rows):
        first = number * per_row
        name = f"rank {first}" if per_row == 1 else f"ranks {first}–{first + len(row) - 1}"
        mean = row.mean(axis=0)
        total = float(mean.sum())
        if height > 10 or number % 4 == 0:
            canvas.text(left - 8, name, kind="end", dy=height - 4 if height > 10 else 7)
            relative = total / max(float(by_rank.mean()), 1e-9)
            canvas.text(
                left + width + 10, f"{bytes_text(total)}  ({relative:.2f})", dy=height - 4 if height > 10 else 7
            )
        x = float(left)
        canvas.box((x, canvas.y), (width, height), "#eef1f4", name)
        for kind, nbytes in enumerate(mean.tolist()):
            extent = nbytes / largest * width
            if extent > 0:
                title = f"{name}: {bytes_text(nbytes)} of {found.kinds[kind]}"
                canvas.box((x, canvas.y), (extent, height), _KIND_COLORS[kind % len(_KIND_COLORS)], title)
            x += extent
        canvas.y += height + (4 if height > 10 else 1)
    mean_x = left + float(by_rank.mean()) / largest * width
    canvas.elements.append(
        f'<line x1="{mean_x:.1f}" x2="{mean_x:.1f}" y1="{top - 4:.1f}" y2="{canvas.y:.1f}" class="mean"/>'
    )


def _draw_legend(canvas: _Canvas, found: Holdings) -> None:
    x = float(_MARGIN + 90)
    canvas.y += 4
    for kind, name in enumerate(found.kinds[: len(_KIND_COLORS)]):
        if x > WIDTH - 200:
            x = float(_MARGIN + 90)
            canvas.y += 18
        total = bytes_text(float(found.nbytes[:, kind].sum()))
        canvas.box((x, canvas.y), (12, 12), _KIND_COLORS[kind], name)
        canvas.text(x + 17, f"{name}, {total}", dy=10)
        x += 17 + 7.2 * len(f"{name}, {total}") + 18
    canvas.y += 26


# Tensors ------------------------------------------------------------------------------------------------------------


def _draw_tensors(canvas: _Canvas, found: Holdings) -> None:
    note = "Flat and row shards from left to right, first element to last; column shards and grids as they lie. "
    note += "+11: eleven more of this shape are cut alike."
    canvas.heading("Who holds which part of each tensor", note)
    num_ranks = len(found.nbytes)
    _draw_rank_scale(canvas, num_ranks)
    for strip in found.strips[:_MAX_STRIPS]:
        _draw_strip(canvas, strip, num_ranks)
    left_out = found.num_left_out + sum(1 + len(strip.others) for strip in found.strips[_MAX_STRIPS:])
    if left_out:
        canvas.y += 12
        canvas.text(_MARGIN, f"... and {left_out} more tensors", kind="faint")


def _draw_rank_scale(canvas: _Canvas, num_ranks: int) -> None:
    left, width = _MARGIN + _LABEL_WIDTH, _BAR_WIDTH / max(num_ranks, 1)
    every = max(1, -(-num_ranks // 16))
    canvas.y += 10
    canvas.text(left - 10, "colors of the ranks", kind="end faint", dy=14)
    for rank in range(num_ranks):
        canvas.box((left + rank * width, canvas.y + 4), (width, 12), rank_color(rank, num_ranks), f"rank {rank}")
        if rank % every == 0:
            canvas.text(left + (rank + 0.5) * width, str(rank), kind="middle faint", dy=0)
    canvas.y += 26


def _draw_strip(canvas: _Canvas, strip: Strip, num_ranks: int) -> None:
    is_grid = any(cell.height < 1 for cell in strip.cells)
    height = 40.0 if is_grid else 14.0
    left = _MARGIN + _LABEL_WIDTH
    count = f" +{len(strip.others)}" if strip.others else ""
    names = "\n".join((strip.name, *strip.others[:40]))
    canvas.text(left - 10, _elided(strip.name, 40) + count, kind="end", dy=height / 2 + 4, title=names)
    canvas.box((left, canvas.y), (_BAR_WIDTH, height), "#eef1f4", "held by none")
    for cell in strip.cells:
        at = left + cell.x * _BAR_WIDTH, canvas.y + cell.y * height
        size = max(cell.width * _BAR_WIDTH, 0.3), cell.height * height
        share = bytes_text(strip.nbytes * cell.width * cell.height)
        canvas.box(at, size, rank_color(cell.rank, num_ranks), f"{strip.name}: {share} on rank {cell.rank}")
    note = f"{strip.form}, {bytes_text(strip.nbytes)}" + (
        f", {strip.num_replicas} copies" if strip.num_replicas > 1 else ""
    )
    canvas.text(left + _BAR_WIDTH + 10, note, kind="faint", dy=height / 2 + 4)
    canvas.y += height + 5


def _elided(name: str, length: int) -> str:
    if len(name) <= length:
        return name
    front = (length - 1) // 3
    return f"{name[:front]}…{name[front + 1 - length :]}"


# Moves --------------------------------------------------------------------------------------------------------------


def _draw_moves(canvas: _Canvas, moved: NDArray[np.int64]) -> None:
    num_from, num_to = moved.shape
    total = float(moved.sum()) or 1.0
    stays = float(np.trace(moved))
    canvas.heading(
        f"What moves from {num_from} to {num_to} ranks",
        f"{bytes_text(total - stays)} of {bytes_text(total)} change their rank. Rows: old ranks; columns: new ones.",
    )
    step = -(-max(moved.shape) // 64)  # ranks that share a cell
    pooled = np.add.reduceat(np.add.reduceat(moved, range(0, num_from, step), axis=0), range(0, num_to, step), axis=1)
    size = min(22.0, 620.0 / max(pooled.shape))
    left, largest = _MARGIN + 90, float(pooled.max()) or 1.0
    for i, row in enumerate(pooled.tolist()):
        if i % max(1, len(pooled) // 16) == 0:
            canvas.text(left - 8, f"rank {i * step}", kind="end", dy=(i + 0.5) * size + 4)
        for j, nbytes in enumerate(row):
            color = _mixed((238, 241, 244), (31, 84, 140), (nbytes / largest) ** 0.6)
            title = f"{bytes_text(nbytes)} from rank {i * step} to rank {j * step}"
            canvas.box((left + j * size, canvas.y + i * size), (size - 1, size - 1), color, title)
    canvas.y += len(pooled) * size
    for j in range(0, pooled.shape[1], max(1, pooled.shape[1] // 16)):
        canvas.text(left + (j + 0.5) * size, str(j * step), kind="middle faint", dy=14)
    canvas.y += 18


def _mixed(one: Sequence[int], other: Sequence[int], share: float) -> str:
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(one, other, strict=True))
