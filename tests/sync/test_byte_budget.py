import trio
import trio.testing

from lakefs_fuse.sync.byte_budget import ByteBudget


async def test_first_come_first_served() -> None:
    budget = ByteBudget(10)
    order: list[str] = []

    async def take(name: str, wanted: int) -> None:
        await budget.acquire(wanted)
        order.append(name)

    await budget.acquire(6)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, "large", 8)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(take, "small", 3)
        await trio.testing.wait_all_tasks_blocked()
        assert order == []
        assert budget.tasks_waiting == 2
        assert not budget.acquire_nowait(1), "nobody overtakes"
        budget.release(6)
        await trio.testing.wait_all_tasks_blocked()
        assert order == ["large"]
        budget.release(8)
    assert order == ["large", "small"]
    assert budget.bytes_used == 3


async def test_more_than_everything_is_everything() -> None:
    budget = ByteBudget(10)
    with trio.fail_after(1):
        await budget.acquire(100)
    assert budget.bytes_used == 10
    budget.release(100)
    assert budget.bytes_used == 0


async def test_asking_without_waiting_can_leave_room_for_others() -> None:
    budget = ByteBudget(10)
    assert not budget.acquire_nowait(8, leave_bytes=3)
    assert budget.acquire_nowait(7, leave_bytes=3)
    assert not budget.acquire_nowait(4)


async def test_one_who_gives_up_lets_the_next_pass() -> None:
    budget = ByteBudget(10)
    await budget.acquire(5)
    scope = trio.CancelScope()

    async def give_up() -> None:
        with scope:
            await budget.acquire(8)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_up)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(budget.acquire, 5)
        await trio.testing.wait_all_tasks_blocked()
        assert budget.tasks_waiting == 2
        scope.cancel()
    assert budget.bytes_used == 10
    assert budget.tasks_waiting == 0


async def test_one_who_gives_up_with_the_turn_in_hand_gives_it_back() -> None:
    budget = ByteBudget(10)
    await budget.acquire(10)
    scope = trio.CancelScope()

    async def give_up() -> None:
        with scope:
            await budget.acquire(4)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_up)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        budget.release(10)
    assert budget.bytes_used in (0, 4)
    assert (budget.bytes_used == 4) == (not scope.cancelled_caught)
