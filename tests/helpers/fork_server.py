"""What the fork server imports last: trials in its processes are forks of them, and they do not wait for disks."""

import os

from helpers.trials import Forked, fork_trials

fork_trials(Forked)
os.fsync = lambda descriptor: None
