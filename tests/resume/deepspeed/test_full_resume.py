"""Native full resume is bit-exact: what upstream gets right must stay right (guards, on every wheel)."""

import pytest

from resume.deepspeed.story import Story, cells, loads


@pytest.mark.guard
@pytest.mark.parametrize("cell", [pytest.param(c, id=c.id) for c in cells() if loads(c)])
def test_full_resume_is_exact(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())
