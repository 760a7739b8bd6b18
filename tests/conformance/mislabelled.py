"""The threaded engine of the docs, but tokens are labelled by what the receiver says: too late for the first ones."""

import asyncio

from tests.conformance.plain import threaded


class Versions(list):
    """Labels of tokens, by what the receiver of updates indicates when they are noted."""

    def __init__(self, endpoint):
        super().__init__()
        self.endpoint = endpoint

    def append(self, _):
        super().append(self.endpoint.updates.session.version)


class MislabelledEndpoint(threaded.ThreadedEndpoint):
    async def apply(self, update):
        await super().apply(update)
        await asyncio.sleep(0.2)  # tokens are sampled before the receiver hears of it

    def sample(self, it):
        if not isinstance(it.versions, Versions):
            it.versions = Versions(self)
        return super().sample(it)


def make(model_dir):
    return MislabelledEndpoint(model_dir, "mislabelled", 8, 192)
