"""One law left out: what is replaced in which file, and who is asked to notice.

Consumes    nothing
Produces    Mutant
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One law left out."""

    law: str
    file: str
    old: str
    new: str
    tests: str
    """what pytest is given, apart by spaces"""
    slow: bool = False
    """its tests train: most of a minute"""
