"""A hub's name is looked up for each connection, so that a hub that has moved is found again."""

import socket
from pathlib import Path
from typing import Any

import pytest
from net_server import SmallHub

from ciuic.net.client import HubClient
from ciuic.net.messages import LogRequest, Ok

NAME = "hub.ciuic.test"


def test_every_connection_looks_the_hubs_name_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = SmallHub(tmp_path / "hub", names=[NAME]).start()
    look_up, asked = socket.getaddrinfo, []

    def getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        asked.append(host)
        return look_up("127.0.0.1" if host == NAME else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    url = hub.url.replace("127.0.0.1", NAME)
    client = HubClient(url, hub.authority.certificate_pem, *hub.client_files(), timeout_s=30)
    for times in (1, 2, 3):
        for _ in range(2):
            assert client.call("POST", "/v1/node/logs", LogRequest(run_id="r", lines=[]), Ok).ok
        assert asked.count(NAME) == times, "once per connection"
        hub.stop()
        hub.start()
    client.close()
    hub.stop()
