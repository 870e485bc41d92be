"""Copies MathJax into the site, from the package jupyter-server-mathjax, so that formulas are shown without a network.

mkdocs calls `on_post_build`. Without the package (`pip install --no-deps jupyter-server-mathjax`) formulas stay as TeX, and the build warns.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from typing import Any

PARTS = ("MathJax.js", "config", "jax", "fonts", "extensions", "LICENSE")
LOG = logging.getLogger("mkdocs.hooks.formulas")


def source() -> Path | None:
    """The folder of MathJax inside the package; None if it is not installed. Nothing of the package is imported."""
    found = importlib.util.find_spec("jupyter_server_mathjax")
    folder = Path(found.origin).parent / "static" if found is not None and found.origin else None
    return folder if folder is not None and (folder / "MathJax.js").exists() else None


def on_post_build(config: Any, **kwargs: Any) -> None:
    """Copy MathJax to site/mathjax."""
    folder, target = source(), Path(config["site_dir"]) / "mathjax"
    if folder is None:
        LOG.warning("formulas stay as TeX: pip install --no-deps jupyter-server-mathjax")
        return
    for part in PARTS:
        if (folder / part).is_dir():
            shutil.copytree(folder / part, target / part, dirs_exist_ok=True)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / part, target / part)
