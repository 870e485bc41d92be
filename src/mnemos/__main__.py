"""`python -m mnemos`."""

import sys

from .cli import main

sys.exit(main())
