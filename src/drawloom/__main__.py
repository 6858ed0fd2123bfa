"""python -m drawloom."""

import sys

from drawloom.graph.cli import main

sys.exit(main())
