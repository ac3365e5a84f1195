"""The exceptions of Horovod's API."""


class HorovodInternalError(RuntimeError):
    """An operation failed: a rank was lost or shut down, or ranks asked for different things.

    The text names the ranks.  `elastic.run` catches it, and starts again from the last commit.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Processes wait to join (or left): `elastic.run` makes the group again.

    Attributes:
        skip_sync: ranks have only left, so the state is already the same on all.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the ranks of this job change")
        self.skip_sync = skip_sync
