"""Pictures of a study on disk: which ones a frame of effects makes, and saving them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from experiments import plots
from experiments.frames import BadPath
from experiments.options import By
from experiments.tables import PART

DPI = 110


def save(ax: Axes, path: Path) -> Path:
    """Write the figure that axes stand in, and let go of it.

    Raises:
        BadPath: it can't be written.
    """
    figure = ax.get_figure(root=True)
    assert figure is not None, "axes that a picture returns stand in a figure"
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise BadPath(f"can't write {path}: {error.strerror or error}.") from None
    finally:
        plt.close(figure)
    return path


def heat_maps(df: pd.DataFrame, by: By | None) -> Iterator[tuple[str, Axes]]:
    """Heat maps of an ablation's first metric, each with a name for its file.

    Whole tensors: by block. Parts: one tensor by block; or several, a picture a block. Positions of prompts of several
    shapes: a picture a shape.
    """
    here = df[df["metric"] == df["metric"].iloc[0]]
    across = PART[by]
    down = "block" if by and here["tensor"].nunique() == 1 else "tensor"
    apart = [name for name in ("group", "block") if name in here and name not in (down, across)]
    several = [name for name in apart if here[name].nunique() > 1]
    for key, part in here.groupby(several, sort=False) if several else [((), here)]:
        label = "_".join(
            f"block{part['block'].iloc[0]}" if name == "block" else f"shape{list(here['group'].unique()).index(value)}"
            for name, value in zip(several, key, strict=True)
        )
        yield "_".join(filter(None, ("effects", label))), plots.heatmap(part, y=down, x=across)
