"""Makes tests/helpers.py importable from every test folder."""
