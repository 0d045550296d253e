"""Imported once, where rank processes are forked from: they start with NeMo and what it stands on loaded."""

from resume.nemo.compat import prepare

prepare()
