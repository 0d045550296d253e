"""A pytest plugin: at most `--carry-sample` tests of each fault, spread evenly over all that would run.

It runs in a stack's Python, beside the tests' own plugin, so it imports nothing of carry.
"""

import pytest


def pytest_addoption(parser):
    parser.addoption("--carry-sample", type=int, default=0, help="tests of each fault at most; 0 is all")


@pytest.hookimpl(trylast=True)  # after the tests of other faults are out
def pytest_collection_modifyitems(config, items):
    limit = config.getoption("--carry-sample")
    if not limit:
        return
    by_fault = {}
    for item in items:
        mark = item.get_closest_marker("fault")
        by_fault.setdefault(mark.args[0] if mark else None, []).append(item)
    keep = {item.nodeid for several in by_fault.values() for item in spread(several, limit)}
    drop = [item for item in items if item.nodeid not in keep]
    config.hook.pytest_deselected(items=drop)
    items[:] = [item for item in items if item.nodeid in keep]


def spread(items, limit):
    """`limit` of `items`, the first and the last among them, the others evenly between."""
    if len(items) <= limit:
        return items
    return [items[round(n * (len(items) - 1) / max(1, limit - 1))] for n in range(limit)]
