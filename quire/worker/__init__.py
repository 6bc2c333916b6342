"""The muscle's front room: this file is run before anything that imports torch."""

from __future__ import annotations

import os

from quire.foundation.bytecode import keep_bytecode

# How long OpenMP's threads wait for each other in a busy loop, in turns of about 40 ns. Its default, milliseconds, is
# longer than the scheduler's patience: with one core taken by another process a CPU step takes ten times as long. This
# value bridges the gaps between the operations of a step, and nothing is lost on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

keep_bytecode("torch")
