"""The threaded engine of the docs, except that tokens get the receiver's version, which changes too late."""

import asyncio

from tests.conformance.plain import threaded


class Versions(list):
    """Labels of tokens: the version that the receiver of updates reports when they are recorded."""

    def __init__(self, endpoint):
        super().__init__()
        self.endpoint = endpoint

    def append(self, _):
        super().append(self.endpoint.updates.session.version)


class MislabelledEndpoint(threaded.ThreadedEndpoint):
    async def apply(self, update):
        await super().apply(update)
        await asyncio.sleep(0.2)  # tokens are sampled before the receiver is notified

    def sample(self, it):
        if not isinstance(it.versions, Versions):
            it.versions = Versions(self)
        return super().sample(it)


def make(model_dir):
    return MislabelledEndpoint(model_dir, "mislabelled", 8, 192)
