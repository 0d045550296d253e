"""What the ranks of test_ranks.py run."""

import os
import sys
import time

from resume import symptoms

RANK = -1


def setup(rank, world):
    global RANK
    RANK = rank


def broken_setup(rank, world):
    raise ImportError("no such framework")


def who():
    return RANK, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.getpid()


def fail(ranks=(0,), symptom=False):
    if RANK in ranks:
        raise (symptoms.MastersStale("masters w") if symptom else KeyError("dp_world_size"))
    return RANK


def one_fails_others_wait(seconds=60):
    if RANK == 0:
        raise FileNotFoundError("optim_states.pt")
    time.sleep(seconds)


def sleep(seconds):
    time.sleep(seconds)


def die():
    os._exit(7)


def unpicklable():
    return sys.stdout
