"""The kernels in C: sources, compilation at first use, and the operators over the compiled library."""
