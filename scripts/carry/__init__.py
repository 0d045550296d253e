"""Keep patches against pinned upstream releases true, and ship them as wheels."""

__version__ = "0.1.0"
