"""Self-contained HTML pages: style, script and data inline, and a policy that forbids network access.

Text reaches a page only as data, with every < escaped; scripts insert it as text, never as HTML.
"""

from __future__ import annotations

import base64
import html
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..atomic_io import write_text
from ..colours import style_sheet
from ..eval.files import finite

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def head(title: str, style: str = "") -> str:
    """The head of every page: a policy without network access, the shared style, and additional style."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{html.escape(title)}</title>
<style>
{style_sheet()}
{asset("style.css")}{style}
</style>
</head>"""


def render(title: str, kind: str, data: dict[str, Any]) -> str:
    """The page of `kind` ("inspect" or "analyze") with its data.

    >>> "</script><b>" in render("x", "inspect", {"panels": ["</script><b>"]})
    False
    """
    packed = json.dumps(finite(data), separators=(",", ":")).translate(ESCAPES)
    scripts = "\n".join(asset(name) for name in ("common.js", "chart.js", f"{kind}.js"))
    return f"""{head(title)}
<body>
<noscript>This page draws itself with JavaScript, which is switched off.</noscript>
<main id="page"></main>
<script type="application/json" id="data">{packed}</script>
<script>
"use strict";
{scripts}
</script>
</body>
</html>
"""


def pack(x: Tensor) -> dict[str, Any]:
    """Numbers in the format of the script: shape, and little-endian float32 in base64. NaN stays NaN."""
    return {"shape": list(x.shape), "f32": _base64(x, "<f4")}


def pack_indices(x: Tensor) -> dict[str, Any]:
    """Integers from -32,768 to 32,767, in the format of the script."""
    return {"shape": list(x.shape), "i16": _base64(x, "<i2")}


def write_page(path: str | os.PathLike, page: str) -> Path:
    """Write a page, atomically; its folder must exist."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"out={str(path)!r} cannot be written: {path.parent} is not a folder")
    if path.is_dir():
        raise ValueError(f"out={str(path)!r} is a folder; give a file, such as {path / 'page.html'}")
    write_text(path, page)
    return path


def _base64(x: Tensor, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(x.detach().cpu().numpy().astype(kind)).tobytes()).decode()


def asset(name: str) -> str:
    """A style or script file of the pages."""
    return (resources.files("mnemos.report") / "assets" / name).read_text(encoding="utf-8").strip()
