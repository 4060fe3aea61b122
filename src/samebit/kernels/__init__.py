"""Row-pure kernels: tensors in, tensors out. Imports no other part of samebit."""
