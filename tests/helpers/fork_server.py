"""What the fork server imports last: trials in its processes are forks of them, and they do not wait for disks."""

import gc
import os

from helpers.trials import Forked, fork_trials
from wherewhat.measures.measurement import measurements

fork_trials(Forked)
os.fsync = lambda descriptor: None
measurements()  # imports their modules
gc.collect()
gc.freeze()  # a collection in a fork would otherwise visit, and copy, everything that the server has imported
