"""The base of what looks at torch's operations on their way. Knows no kernel."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode that torch's compiler is not kept away from, as nothing here is compiled by it.

    To keep it away torch would load it, which takes seconds, and enter a guard of its own for each operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
