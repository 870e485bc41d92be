"""One colour per model in every plot and page: name -> colour for light and for dark backgrounds.

Colours differ in lightness too, so that they stay apart in print and for colour-blind readers; lines are labelled by name as well.
"""

from __future__ import annotations

from collections.abc import Iterable

PALETTE: tuple[tuple[str, str], ...] = (  # light background, dark background
    ("#0b62c4", "#6cb1ff"),  # blue
    ("#c2500a", "#ff9d5c"),  # orange
    ("#1e7d4f", "#63d39a"),  # green
    ("#a0398a", "#ec8fd8"),  # magenta
    ("#8a6d00", "#e3c24c"),  # gold
    ("#0f8ea3", "#5fd3e6"),  # teal
    ("#6b4fc0", "#b6a0ff"),  # violet
    ("#63605b", "#b4b0aa"),  # grey
    ("#b3261e", "#ff8f85"),  # red
    ("#3f5d1c", "#a9cf6f"),  # olive
    ("#7a4a2b", "#d9a27c"),  # brown
    ("#1c3f7a", "#a9c0f0"),  # navy
)
BLUE, ORANGE, GREEN, MAGENTA, GOLD, TEAL, VIOLET, GREY, RED, OLIVE, BROWN, NAVY = range(len(PALETTE))
KNOWN: dict[str, int] = {
    "memory": ORANGE,
    "window only": BLUE,
    "full attention": GREY,
    "swa": BLUE,
    "transformer": GREY,
    "titans-mag": ORANGE,
    "titans-mac": GREEN,
    "titans-mal": MAGENTA,
    "titans-lmm": GOLD,
    "atlas-mag": RED,
    "atlas-mac": OLIVE,
    "atlas": VIOLET,
    "atlas-interval": NAVY,
    "omeganet": BROWN,
    "deltanet": TEAL,
}


def colour_index(name: str, taken: int = 0) -> int:
    """The place of a model in the palette: its own for a known name, else the `taken`-th.

    >>> colour_index("swa") == colour_index("window only"), colour_index("my run", 13)
    (True, 1)
    """
    return KNOWN.get(name, taken % len(PALETTE))


def colour(name: str, taken: int = 0, dark: bool = False) -> str:
    """The colour of a model.

    >>> colour("swa"), colour("swa", dark=True)
    ('#0b62c4', '#6cb1ff')
    """
    return PALETTE[colour_index(name, taken)][dark]


def colours_of(names: Iterable[str]) -> dict[str, int]:
    """Places in the palette for models that are shown together: known names keep their own, others get free ones in order.

    >>> colours_of(["mine", "swa", "other"])
    {'mine': 1, 'swa': 0, 'other': 2}
    """
    names = list(dict.fromkeys(names))
    taken = {KNOWN[name] for name in names if name in KNOWN}
    free = [place for place in range(len(PALETTE)) if place not in taken] or list(range(len(PALETTE)))
    unknown = [name for name in names if name not in KNOWN]
    return {name: KNOWN[name] if name in KNOWN else free[unknown.index(name) % len(free)] for name in names}


def style_sheet() -> str:
    """The palette as custom properties --c0, --c1 … for light and dark pages.

    >>> style_sheet()[:23]
    ':root { --c0: #0b62c4; '
    """
    light, dark = (" ".join(f"--c{i}: {pair[scheme]};" for i, pair in enumerate(PALETTE)) for scheme in (False, True))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
