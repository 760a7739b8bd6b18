"""A `TrainerWorker` that is right and unusual: every matrix is stored column by column."""

from inflight.contracts import WorkerKind
from tests.conformance.plain.worker import PlainWorker


class ColumnKind(WorkerKind):
    def create(self, settings):
        return ColumnWorker(settings)


KIND = ColumnKind()


class ColumnWorker(PlainWorker):
    def __init__(self, settings):
        super().__init__(settings)
        self.store_columns()

    def store_columns(self):
        for parameter in self.parameters.values():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()

    def save(self, path):
        for parameter in self.parameters.values():  # transformers saves no other layout
            parameter.data = parameter.data.contiguous()
        try:
            super().save(path)
        finally:
            self.store_columns()
