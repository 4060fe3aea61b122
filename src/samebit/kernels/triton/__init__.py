"""The kernel set for CUDA devices, in Triton: one file per family, assembled in ``set``. Knows no model."""
