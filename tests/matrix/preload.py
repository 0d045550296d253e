"""Imported once, where rank processes are forked from: they start with DeepSpeed loaded."""

import contextlib
import functools
import os
import sys

# upstream prints as it goes; what a cell ended with is in its row, and the terminal is for the progress.
# Before DeepSpeed is imported: its logger keeps the stream it finds
sys.stdout = open(os.devnull, "w")  # noqa: SIM115

from resume.deepspeed import cpu_adam  # noqa: E402
from resume.deepspeed.compat import prepare  # noqa: E402

prepare()
cpu_adam.use()
with contextlib.suppress(ImportError):
    import cpuinfo

    # it starts a process that looks at the processor for a second, and every CPUAdam asks it twice
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
