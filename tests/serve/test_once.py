"""Locks of turns that have a key: of the last few thousand, and of all that run."""

from __future__ import annotations

import asyncio

from regard.serve.once import MOST, Once


def test_a_turn_that_runs_keeps_its_lock_however_many_come_after_it() -> None:
    async def crowd() -> tuple[bool, int]:
        once = Once()
        running = once.turn("first")
        async with running:
            for i in range(2 * MOST):
                once.turn(f"other {i}")
            return once.turn("first") is running, len(once._turns)

    same, held = asyncio.run(crowd())
    assert same
    assert held <= MOST + 1
