"""Imported once, where rank processes are forked from: they start with DeepSpeed loaded."""

import contextlib
import functools

from resume.deepspeed.compat import prepare

from matrix import ops

prepare()
ops.use()
with contextlib.suppress(ImportError):
    import cpuinfo

    # it starts a process that looks at the processor for a second, and every CPUAdam asks it twice
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
