"""Run the command line as `python -m thunderagent`."""

import sys

from thunderagent.cli import main

sys.exit(main())
