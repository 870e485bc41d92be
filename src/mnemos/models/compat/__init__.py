"""Other implementations' names and keywords for our models: their snippets run by changing the import to `mnemos.compat`.

Only arguments are translated. An unknown keyword raises an error that suggests the nearest name; a keyword that the other implementation
has and this one lacks raises an error with the reason (`unsupported.py`).
"""
