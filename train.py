"""Distils attention gates for a frozen model.

python train.py --model tiny-reasoner
deepspeed train.py --model Qwen3-8B
torchrun --nproc-per-node 8 train.py --model Qwen3-8B
"""

import sys

from seergate.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
