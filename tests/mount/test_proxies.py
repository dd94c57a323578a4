"""A mount sends every request through the proxy that the environment names."""

from __future__ import annotations

from tests.forward_proxy import HOST, PASSWORD, forward_proxy
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, noise
from tests.servers import Server


def test_mount_behind_a_proxy_sends_every_request_through_it(make_lake: LakeMaker, seaweed: Server) -> None:
    """The endpoint's name means nothing but to the proxy: a request that goes around it fails."""
    small, large = noise(70_000, 1), noise(2 * MIB, 2)
    with forward_proxy(seaweed, password=True) as proxy:
        lake = make_lake("seaweedfs", "--addressing-style", "path", through=seaweed.at(f"http://{HOST}:8333"))
        lake.env |= {"http_proxy": proxy.url_with_password, "no_proxy": "", "NO_PROXY": ""}
        lake.outside.replace("by-others", large)
        lake.mount()
        (lake.path / "small").write_bytes(small)
        (lake.path / "large").write_bytes(large)
        lake.sync()
        lake.remount(empty_cache=True)
        assert sorted(path.name for path in lake.path.iterdir()) == ["by-others", "large", "small"]
        assert (lake.path / "small").read_bytes() == small
        assert (lake.path / "by-others").read_bytes() == large
        (lake.path / "small").unlink()
        lake.sync()
        counted = sum(lake.number(f"store.requests.{kind}") for kind in ("get", "head", "list", "put"))
        assert 0 < counted <= len(proxy.urls) == proxy.asked(f" http://{HOST}:8333/")
        for what in ("list-type=2", "PUT ", "HEAD ", "/small"):
            assert proxy.asked(what)
        assert lake.number("store.errors") == proxy.refused == 0
        lake.umount()
    assert PASSWORD not in lake.log()
    assert "proxy%3Ap%40ss" not in lake.log()
