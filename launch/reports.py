"""Where a run's figures go besides the terminal: Prometheus, TensorBoard; each by setting.

Consumes    the buffer's status, at each tick of the driver
Produces    what launch/prometheus.py serves and launch/tensorboard.py writes
Waits for   nothing
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launch.prometheus import Exporter
from launch.tensorboard import TensorBoard
from launch.tree import MetricsTable
from launch.view import snapshots


class Reports:
    """Use as a context manager."""

    def __init__(self, settings: MetricsTable, directory: Path) -> None:
        self._exporter = Exporter(settings.prometheus_port)
        self._tensorboard = TensorBoard(directory, enabled=settings.tensorboard)
        self._stack = ExitStack()

    def __enter__(self) -> Reports:
        self._stack.enter_context(self._exporter)
        self._stack.enter_context(self._tensorboard)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def update(self, status: Mapping[str, Any]) -> None:
        """Takes the buffer's newest status."""
        self._exporter.update(snapshots(status), status)
        self._tensorboard.update(status, time.time())
