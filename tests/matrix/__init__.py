"""The resume matrix: every way to resume that a release offers, as cells, and what comes of each.

``modes``, ``cells``, ``pairs`` and ``verdicts`` are data and plain functions; ``training`` and ``jobs`` run on ranks,
inside the framework; ``run`` is the parent that drives them.
"""
