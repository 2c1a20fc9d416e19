//! Backend on SIMD kernels chosen at run time.
