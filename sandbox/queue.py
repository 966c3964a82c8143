"""The waiting calls of a node: fair between tenants, by priority within one.

Consumes    items with their tenant and priority
Produces    the next item
Waits for   nothing: pure
Invariant   while several tenants wait, each gets the same number of turns; within a tenant the higher priority goes
            first, and equal ones in the order they came
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Round robin over tenants, each a heap."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, list[tuple[int, int, Item]]] = OrderedDict()
        self._sequence = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: str, priority: int, item: Item, *, again: bool = False) -> None:
        """Add an item; `again`: it was out already and goes before its equals."""
        self._sequence += 1
        order = -self._sequence if again else self._sequence
        heapq.heappush(self._tenants.setdefault(tenant, []), (-priority, order, item))
        self._size += 1

    def pop(self) -> Item | None:
        """Take the next item of the tenant whose turn it is; None when empty."""
        if not self._tenants:
            return None
        tenant, heap = next(iter(self._tenants.items()))
        item = heapq.heappop(heap)[2]
        self._size -= 1
        if heap:
            self._tenants.move_to_end(tenant)
        else:
            del self._tenants[tenant]
        return item
