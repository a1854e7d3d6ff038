# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws README's chart of the figures in docs/images/results.json.

python benchmarks/plot_results.py docs/images/results.json docs/images/results.png

The file says for each panel which command measured it; the tables behind it are in
docs/performance.md. Needs matplotlib: ``pip install -e .[plot]``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, OTHERS = "#1f6f8b", "#b8bec4"


def draw_panel(axis: plt.Axes, panel: dict[str, Any]) -> None:
    """Draw one comparison as bars, the best first."""
    rows = panel["rows"]
    names = [row["name"] for row in rows]
    values = [row["value"] for row in rows]
    colors = [OURS if row["ours"] else OTHERS for row in rows]
    bars = axis.barh(names, values, color=colors)
    axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
    axis.axvline(1.0, color="#555555", linewidth=0.8, linestyle=":")
    axis.invert_yaxis()
    axis.set_xlim(0, max(values) * 1.18)
    axis.set_title(panel["title"], fontsize=10, loc="left")
    axis.set_xlabel(panel["unit"], fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path, help="JSON with the panels")
    parser.add_argument("picture", type=Path, help="PNG to write")
    options = parser.parse_args()
    panels = json.loads(options.figures.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(2, 2, figsize=(10, 5.2), layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=True):
        draw_panel(axis, panel)
    figure.savefig(options.picture, dpi=110)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
