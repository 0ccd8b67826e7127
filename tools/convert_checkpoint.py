"""Writes a checkpoint in Hugging Face's format, as `titan-async convert` does, if that is not installed.

python tools/convert_checkpoint.py outputs/debug hf/debug --dtype bf16
"""

import sys

from titan_async.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
