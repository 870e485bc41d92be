"""Shows the notebook as a page of the site, with its outputs: mkdocs adds tutorial.md, made from tutorial.ipynb."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

NOTEBOOK = "tutorial.ipynb"
PAGE = "tutorial.md"


def on_files(files: Any, config: Any, **kwargs: Any) -> Any:
    """mkdocs' hook: add the page and the images of the notebook's outputs."""
    from mkdocs.structure.files import File

    text, images = as_markdown(json.loads((Path(config["docs_dir"]) / NOTEBOOK).read_text()))
    files.append(File.generated(config, PAGE, content=text))
    for name, content in images.items():
        files.append(File.generated(config, f"images/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """mkdocs' hook: links to the notebook lead to its page."""
    return markdown.replace(f"({NOTEBOOK})", f"({PAGE})")


def as_markdown(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its images by file name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                name = f"tutorial-{len(images)}.png"
                images[name] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![Output of the cell above](images/{name})")
    return "\n\n".join(parts) + "\n", images
