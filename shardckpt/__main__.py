"""`python -m shardckpt`: the command line, as `torchrun -m shardckpt` starts it."""

from __future__ import annotations

from shardckpt.cli.main import main

if __name__ == "__main__":
    main(prog_name="shardckpt")
