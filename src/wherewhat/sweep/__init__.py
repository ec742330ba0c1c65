"""Sweeps: models × weights × checkpoints × texts × measurements × seeds, into one store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherewhat.lazily import lazy_names

if TYPE_CHECKING:
    from wherewhat.sweep.cell import Cell
    from wherewhat.sweep.engine import EngineError, Resources
    from wherewhat.sweep.expanding import expand
    from wherewhat.sweep.file import SweepFile, read_sweep_file
    from wherewhat.sweep.records import Record, SweepFolder, sweep_folders
    from wherewhat.sweep.running import Outcome, sweep

_HOMES = {
    "Cell": "wherewhat.sweep.cell",
    "EngineError": "wherewhat.sweep.engine",
    "Outcome": "wherewhat.sweep.running",
    "Record": "wherewhat.sweep.records",
    "Resources": "wherewhat.sweep.engine",
    "SweepFile": "wherewhat.sweep.file",
    "SweepFolder": "wherewhat.sweep.records",
    "expand": "wherewhat.sweep.expanding",
    "read_sweep_file": "wherewhat.sweep.file",
    "sweep": "wherewhat.sweep.running",
    "sweep_folders": "wherewhat.sweep.records",
}

__all__ = [
    "Cell",
    "EngineError",
    "Outcome",
    "Record",
    "Resources",
    "SweepFile",
    "SweepFolder",
    "expand",
    "read_sweep_file",
    "sweep",
    "sweep_folders",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
