"""Fixtures of the transport tests."""

from transport.peers import stack

__all__ = ["stack"]
