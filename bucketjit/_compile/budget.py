"""How many compiles, and how many seconds of them, are left."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Spending:
    """How many compiles there were, and how many seconds they took."""

    compiles: int = 0
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
