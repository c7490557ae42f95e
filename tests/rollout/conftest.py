"""Fixtures of the rollout tests."""

from transport.peers import stack

__all__ = ["stack"]
