"""A page of torch's debug server: observe/debug_server.py."""

from ringreduce.observe.debug_server import handlers

__all__ = ["handlers"]
