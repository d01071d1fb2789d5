"""The layouts of a transformer block on a mesh, and its collectives."""

from __future__ import annotations

from plotting.page import COLOURS, Page

_WIDTH, _HEIGHT = 790, 400
_LANES = (258, 330)
"""The vertical middle of the lane of each coordinate on the axis `model`."""
_BOX_WIDTH, _BOX_HEIGHT = 104, 44
_GREY = "#8886"


def mesh_of_block() -> str:
    """Returns the picture as SVG: mesh, batch and one matrix above; below, a block on two places of a row."""
    page = Page(_WIDTH, _HEIGHT, "A transformer block on a mesh of data 2 × model 2")
    _draw_mesh(page, 70, 66)
    _draw_batch(page, 290, 66)
    _draw_matrix(page, 500, 66)
    _draw_block(page)
    return page.to_text()


def _draw_mesh(page: Page, x: float, y: float) -> None:
    page.text(x - 54, y - 12, "mesh: {data: 2, model: 2}", "small")
    for data in range(2):
        page.text(x - 8, y + 34 + 44 * data, f"data {data}", "end small")
        for model in range(2):
            page.bar(x + 64 * model, y + 8 + 44 * data, 60, 40, COLOURS[model])
            page.text(x + 64 * model + 30, y + 33 + 44 * data, f"worker {2 * data + model}", "middle small", "#fff")
    for model in range(2):
        page.text(x + 64 * model + 30, y + 112, f"model {model}", "middle small")


def _draw_batch(page: Page, x: float, y: float) -> None:
    page.text(x - 30, y - 12, "batch: [data, –]", "small")
    for data in range(2):
        page.bar(x, y + 8 + 44 * data, 90, 40, _GREY)
        page.text(x + 45, y + 33 + 44 * data, ("workers 0, 1", "workers 2, 3")[data], "middle small")


def _draw_matrix(page: Page, x: float, y: float) -> None:
    page.text(x - 30, y - 12, "up/kernel: [–, model]", "small")
    for model in range(2):
        page.bar(x + 94 * model, y + 8, 90, 84, COLOURS[model])
        page.text(x + 94 * model + 45, y + 54, ("workers 0, 2", "workers 1, 3")[model], "middle small", "#fff")


def _draw_block(page: Page) -> None:
    page.text(16, 212, "One block on workers 0 and 1, forward:", "small")
    texts = {
        128: ("query, key,", "value: columns"),
        240: ("attention of", "half the heads"),
        352: ("output: rows",),
        524: ("up: columns,", "gelu"),
        636: ("down: rows",),
    }
    for worker, middle in enumerate(_LANES):
        page.text(16, middle + 4, f"worker {worker}", "small")
        page.line(78, middle, _WIDTH - 14, middle, "axis")
        page.text(92, middle - 8, "x", "small")
        for x, lines in texts.items():
            page.bar(x, middle - _BOX_HEIGHT / 2, _BOX_WIDTH, _BOX_HEIGHT, COLOURS[worker])
            for k, text in enumerate(lines):
                y = middle + 4 + (k - (len(lines) - 1) / 2) * 15
                page.text(x + _BOX_WIDTH / 2, y, text, "middle small", "#fff")
    for x in (490, 758):
        page.line(x, _LANES[0], x, _LANES[1], "mark")
        page.text(x + 20, 378, "all-reduce", "end small")
