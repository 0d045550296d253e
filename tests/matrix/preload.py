"""Imported once, where rank processes are forked from: they start with DeepSpeed loaded."""

from resume.deepspeed.compat import prepare

prepare()
