"""The port's end: connections of any state must not keep it from coming to it."""

from asyncio.sslproto import _SSLProtocolTransport  # what uvicorn's connections have
from unittest import mock

from ciuic.hub.port import has_unsent


def test_a_tls_connection_that_was_closed_twice_has_nothing_unsent() -> None:
    protocol = mock.Mock(**{"_get_write_buffer_size.return_value": 7})
    transport = _SSLProtocolTransport(mock.Mock(), protocol)
    assert has_unsent(transport)
    transport.close()
    transport.close()
    assert not has_unsent(transport)
