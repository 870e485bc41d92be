"""The table of presets with parameter counts, cached in a file: counting imports torch, which takes seconds.

`python -m mnemos.cli.preset_table` writes preset_table.json; a test compares the file with the presets.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..choices import unknown

PRESET_TABLE_FILE = Path(__file__).with_suffix(".json")


def kept() -> dict[str, Any]:
    """{"presets": {name: {"block", "choices", "miras", "counts": {size: parameters}}}, "sizes": {name: its fields}}.

    >>> kept()["presets"]["titans-mag"]["block"]
    'mag'
    """
    return json.loads(PRESET_TABLE_FILE.read_text(encoding="utf-8"))


def computed() -> dict[str, Any]:
    """The same table, computed from the presets."""
    from ..models import presets as table

    return {
        "presets": {
            row.name: {
                "block": row.block,
                "choices": row.choices,
                "miras": row.miras,
                "counts": {size: table.count(table.config(row.name, size)) for size in table.SIZES},
            }
            for row in table.PRESETS.values()
        },
        "sizes": {size.name: dataclasses.asdict(size) for size in table.SIZES.values()},
    }


def check_size(name: str, table: dict[str, Any]) -> None:
    """Raise an error that lists the valid sizes for an unknown one."""
    if name not in table["sizes"]:
        raise unknown("size", name, table["sizes"])


if __name__ == "__main__":
    PRESET_TABLE_FILE.write_text(json.dumps(computed(), indent=1) + "\n", encoding="utf-8")
