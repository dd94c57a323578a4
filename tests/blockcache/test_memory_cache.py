from lakefs_fuse.blockcache.memory_cache import ENTRY_BYTES, RecentBlocks
from lakefs_fuse.blockcache.object_version import Version
from tests.blockcache.reading import MIB

A = Version("a", "1", 20 * MIB)
B = Version("b", "1", 20 * MIB)


def block(size: int = MIB) -> memoryview:
    return memoryview(bytes(size))


def test_the_least_recently_read_goes_first() -> None:
    recent = RecentBlocks(4 * MIB)
    for index in range(3):
        recent.put(A, index, [block()])
    assert recent.get(A, 0) is not None
    recent.put(B, 0, [block()])
    assert (A, 1) not in recent
    assert (A, 0) in recent and (A, 2) in recent and (B, 0) in recent


def test_a_buffer_counts_until_its_last_block_goes() -> None:
    recent = RecentBlocks(10 * MIB)
    whole = block(8 * MIB)
    recent.put(A, 0, [whole[index * MIB : (index + 1) * MIB] for index in range(8)])
    for index in range(7):
        recent.put(A, index, [block()])  # replaces a slice; the buffer behind it lives on
        kept = [other for other in range(8) if (A, other) in recent]
        blocks = sum(other <= index for other in kept) + (8 if kept[-1] > index else 0)
        assert recent.bytes_used == blocks * (MIB + ENTRY_BYTES) <= 10 * MIB
    assert (A, 7) not in recent, "room for two blocks more only while the eighth slice keeps all eight in memory"


def test_tiny_blocks_are_bounded_too() -> None:
    recent = RecentBlocks(100 * ENTRY_BYTES)
    for number in range(1000):
        recent.put(Version(str(number), "1", 1), 0, [block(1)])
    assert len(recent) < 100


def test_a_buffer_larger_than_everything_is_not_kept() -> None:
    recent = RecentBlocks(2 * MIB)
    whole = block(8 * MIB)
    recent.put(A, 0, [whole[index * MIB : (index + 1) * MIB] for index in range(8)])
    assert len(recent) == 0
    assert recent.bytes_used == 0
