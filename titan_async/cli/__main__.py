"""`python -m titan_async.cli`, the same as the command `titan-async`."""

import sys

from titan_async.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
