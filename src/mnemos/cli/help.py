"""`mnemos --help`, printed from the registry of commands, without importing their modules."""

from __future__ import annotations

from .commands import COMMANDS

DESCRIPTION = "Sequence models whose memory learns at test time. Each command has --help; --version prints the version."
OPTIONS = {
    "-h, --help": "show this help message and exit",
    "--version": "print the version and exit",
    "--import MODULE": "first import a Python module, or a file such as ./parts.py, that registers components (repeatable)",
}


def print_help() -> None:
    """Usage, options and one line for each command."""
    from rich import box
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=80)

    def panel(title: str, rows: dict[str, str], indent: str = "") -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="bold")
        grid.add_column()
        for name, about in rows.items():
            grid.add_row(indent + name, about)
        return Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style="dim")

    print(f"usage: mnemos [-h] {{{','.join(COMMANDS)}}}\n\n{DESCRIPTION}\n")
    console.print(panel("options", OPTIONS), highlight=False, markup=False)
    commands = {name: command.about for name, command in COMMANDS.items()}
    console.print(panel("subcommands", commands, "• "), highlight=False, markup=False)
