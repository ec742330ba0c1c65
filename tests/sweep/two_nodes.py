"""Run a sweep on a Ray cluster of two nodes of this machine, one of which is killed while it measures.

    python two_nodes.py SWEEP_FILE STORE

It is a process of its own, since a process can be connected to one cluster only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray
import ray._private.services
from ray.cluster_utils import Cluster

from sweep import meeting
from sweep.watching import Told
from wherewhat.sweep.execution import sweep
from wherewhat.sweep.file import read_sweep_file


class Killer(Told):
    """Kills a node as soon as its worker has stopped in the middle of a job."""

    def __init__(self, stopped, kill):
        super().__init__()
        self._stopped, self._kill = stopped, kill

    def running(self, cells):
        super().running(cells)
        if self._kill is not None and self._stopped.exists():
            self._kill()
            self._kill = None


def main() -> None:
    file, store = Path(sys.argv[1]), Path(sys.argv[2])
    # Ray would look for a cluster on the loopback interface at the outer address of this machine.
    ray._private.services.get_node_ip_address = lambda address=None: "127.0.0.1"
    options = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
    head = {**options, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(**options)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        (store.parent / "doomed").write_text(node.node_id)
        watch = Killer(store.parent / "stopped", lambda: cluster.remove_node(node, allow_graceful=False))
        outcome = sweep(read_sweep_file(file), watch=watch, store=str(store), engine="ray", work=meeting.doomed)
        assert watch.workers == "Ray: 2 nodes, 2 CPUs", watch.workers
        assert sorted(watch.ended) == sorted((cell, "done") for cell in outcome.cells)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
