"""The pictures of the page: SVG, one colour per manager on all of them, readable without colour by labels and marks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

mpl.use("svg")  # no display, and fonts stay text: small files that can be searched

import matplotlib.pyplot as plt

_COLOURS = {
    "posix_spawn": "#9e9e9e",
    "popen": "#616161",
    "everdeck": "#00695c",
    "everdeck-each": "#4db6ac",
    "everdeck-each-process": "#80cbc4",
    "everdeck-pure": "#b2dfdb",
    "everdeck-sync": "#26a69a",
    "everdeck-daemon": "#80cbc4",
    "s6": "#1565c0",
    "runit": "#42a5f5",
    "supervisor": "#ef6c00",
    "circus": "#c62828",
    "pm2": "#8e24aa",
    "workerdeck": "#fbc02d",
    "honcho": "#6d4c41",
}
_MARKS = "os^vD<>phX*d"

# The same input gives the same file: element ids are hashed with this instead of with a random number.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "everdeck", "font.size": 9, "font.family": "sans-serif"})


def growth(
    path: Path,
    series: Mapping[str, Mapping[int, Sequence[float]]],
    title: str,
    ylabel: str,
    *,
    bar: float | None = None,
) -> None:
    """Cost per worker over the number of workers: one line per manager, its band the spread of its samples."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    for name, points in series.items():
        sizes = sorted(points)
        middle = [sorted(points[size])[len(points[size]) // 2] for size in sizes]
        colour = _COLOURS.get(name, "#000000")
        mark = _MARKS[list(_COLOURS).index(name) % len(_MARKS)] if name in _COLOURS else "o"
        wide = 2.4 if name.startswith("everdeck") else 1.2
        axes.plot(sizes, middle, marker=mark, markersize=4.5, linewidth=wide, color=colour, label=name)
        low, high = [min(points[size]) for size in sizes], [max(points[size]) for size in sizes]
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    if bar is not None:
        axes.axhline(bar, color="#000000", linewidth=0.8, linestyle=":")
        axes.annotate("bar", (1, bar), xycoords=("axes fraction", "data"), xytext=(3, -2), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("workers")
    axes.set_ylabel(ylabel)
    _finish(figure, axes, title, path)


def bars(path: Path, values: Mapping[str, float], title: str, xlabel: str, *, logarithmic: bool = True) -> None:
    """One number per manager, smallest on top, written beside its bar."""
    names = sorted(values, key=lambda name: -values[name])
    figure, axes = plt.subplots(figsize=(7.2, 0.6 + 0.32 * len(names)))
    drawn = axes.barh(names, [values[name] for name in names], color=[_COLOURS.get(name, "#000000") for name in names])
    axes.bar_label(drawn, labels=[_plain(values[name]) for name in names], padding=3)
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.margins(x=0.15)
    axes.set_xlabel(xlabel)
    _finish(figure, axes, title, path, legend=False)


def _plain(value: float, _position: int = 0) -> str:
    """A number as people write it: 0.35, 4.7, 120, 5,000."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _finish(figure: Figure, axes: Axes, title: str, path: Path, *, legend: bool = True) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(visible=True, which="major", linewidth=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": "everdeck bench"})
    plt.close(figure)
