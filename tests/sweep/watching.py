"""A watcher that remembers what it was told."""

from __future__ import annotations


class Told:
    def __init__(self):
        self.plan = None
        self.workers = None
        self.dashboard = None
        self.most_running = 0
        self.ended = []

    def planned(self, *, left, done, failed):
        self.plan = (left, done, failed)

    def begin(self, *, workers, dashboard):
        self.workers, self.dashboard = workers, dashboard

    def running(self, cells):
        self.most_running = max(self.most_running, len(cells))

    def finished(self, task, record):
        self.ended.append((task.cell, record.state))
